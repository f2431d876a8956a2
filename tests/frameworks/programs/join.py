"""Uneven inputs under Join: rank 1 has more batches, as it may.

run: --nproc-per-node 2
finds: nothing
steps: 5, 7
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
with Join([model]):
    for _ in range(5 + 2 * rank):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
