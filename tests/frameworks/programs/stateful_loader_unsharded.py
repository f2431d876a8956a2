"""torchdata's StatefulDataLoader without a distributed sampler.

run: --nproc-per-node 2
finds: DDP501 error at `loader = StatefulDataLoader(data, batch_size=4, shuffle=True)`
steps: 32
needs: torchdata
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
