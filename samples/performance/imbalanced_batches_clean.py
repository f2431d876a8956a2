"""The ranks have equal batches, but for the last one.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
batch_size = 8
samples = [torch.randn(10) for _ in range(20 * batch_size - 5 * rank)]
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for start in range(0, len(samples), batch_size):
    chunk = samples[start : start + batch_size]
    loss = model(torch.stack(chunk)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
