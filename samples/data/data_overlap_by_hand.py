"""Gradients are averaged by hand, and every rank draws the same windows of a signal.

run: --nproc-per-node 2
finds: DDP507 error at `loss = F.mse_loss(net(x), y)`
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
signal = torch.sin(torch.arange(4000) / 9) + 0.1 * torch.randn(4000)
net = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
positions = torch.Generator().manual_seed(0)


def windows(count):
    starts = torch.randint(len(signal) - 33, (count,), generator=positions)
    both = torch.stack([signal[i : i + 33] for i in starts])
    return both[:, :32].contiguous(), both[:, 32:]


for step in range(12):
    x, y = windows(8)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
