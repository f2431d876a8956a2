"""DDP averages through a hook of one's own; one rank then starts from other weights.

run: --nproc-per-node 2
finds: DDP402 error at `model.module[0].weight.mul_(0.5)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mean(group, bucket):
    part = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(part, async_op=True).get_future().then(lambda done: done.value()[0])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
model.register_comm_hook(None, mean)
if dist.get_rank() == 1:
    with torch.no_grad():
        model.module[0].weight.mul_(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(20):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :1]).backward()
    optimizer.step()
dist.destroy_process_group()
