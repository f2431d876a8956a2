"""ZeroRedundancyOptimizer: the optimizer's state differs between ranks, by design.

run: --nproc-per-node 2
finds: nothing
steps: 8
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
torch.manual_seed(dist.get_rank())
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
