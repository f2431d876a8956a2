"""A layer that the compiled model never uses.

run: --nproc-per-node 2
finds: DDP301 error at `self.extra = nn.Linear(16, 4)`
steps: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.extra = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


dist.init_process_group("gloo")
ddp = DDP(Net())
model = torch.compile(ddp, backend="aot_eager")
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
optimizer.zero_grad()
model(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
optimizer.step()
dist.destroy_process_group()
