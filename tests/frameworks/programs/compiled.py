"""torch.compile around DDP, with gradient accumulation.

run: --nproc-per-node 2
finds: nothing
steps: 5
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
model = torch.compile(ddp, backend="aot_eager")
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank() + 1)
for step in range(5):
    optimizer.zero_grad(set_to_none=True)
    for micro in range(2):
        with ddp.no_sync() if micro == 0 else contextlib.nullcontext():
            (model(torch.randn(4, 8)).square().mean() / 2).backward()
    optimizer.step()
dist.destroy_process_group()
