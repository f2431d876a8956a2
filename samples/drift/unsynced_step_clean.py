"""Accumulation that sets DDP's flag itself, before the forward, as some training loops do.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

micro_steps = 4

dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for it in range(6):
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y) / micro_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
