"""torchdata's StatefulDataLoader, left in the middle of an epoch and resumed.

run: --nproc-per-node 2
finds: nothing
steps: 32
needs: torchdata
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

LAST = 13


def make_loader(data):
    sampler = DistributedSampler(data, shuffle=True)
    return StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=1)


def train(loader, model, optimizer, epochs, most=None):
    steps = 0
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps == most:
                return {"epoch": epoch, "loader": loader.state_dict()}
    return None


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = train(make_loader(data), model, optimizer, range(3), most=LAST)
resumed = make_loader(data)
resumed.load_state_dict(saved["loader"])
train(resumed, model, optimizer, range(saved["epoch"], 4))
dist.destroy_process_group()
