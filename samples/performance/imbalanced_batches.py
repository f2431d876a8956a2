"""Rank 0 got a smaller batch size, and the others wait for nobody but it waits for them.

run: --nproc-per-node 2
finds: DDP704 warning at `loss = model(torch.stack(chunk)).square().mean()`
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
batch_size = 4 if rank == 0 else 12
samples = [torch.randn(10) for _ in range(20 * batch_size)]
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for start in range(0, len(samples), batch_size):
    chunk = samples[start : start + batch_size]
    loss = model(torch.stack(chunk)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
