"""torchdata's StatefulDataLoader and sampler, whose epoch never changes.

run: --nproc-per-node 2
finds: DDP503 warning at `sampler = StatefulDistributedSampler(data, shuffle=True)`
steps: 24
needs: torchdata
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = StatefulDistributedSampler(data, shuffle=True)
loader = StatefulDataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
