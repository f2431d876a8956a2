"""Post-local SGD: ranks go their own ways between averagings, by design.

run: --nproc-per-node 2
finds: nothing
steps: 11
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(8, 4))
subgroup, _ = dist.new_subgroups(group_size=1)
state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=3)
model.register_comm_hook(state, post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(
    optim=torch.optim.SGD(model.parameters(), lr=0.05),
    averager=PeriodicModelAverager(period=4, warmup_steps=3),
)
torch.manual_seed(dist.get_rank())
for _ in range(11):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
