"""The backbone is frozen after some epochs and the module wrapped again, while the old wrapper
still exists.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
opt = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    if epoch == 2:
        net.module[0].requires_grad_(False)
        net = DistributedDataParallel(net.module)
        opt = optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    for _ in range(10):
        opt.zero_grad()
        loss = net(torch.randn(8, 6)).square().mean()
        loss.backward()
        opt.step()
dist.destroy_process_group()
