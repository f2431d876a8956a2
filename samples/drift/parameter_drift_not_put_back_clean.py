"""Parameters are moved for a second look at the loss, and put back.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def climb(parameters):
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.add_(p.grad, alpha=0.05)
    return before


@torch.no_grad()
def descend(parameters, before):
    for p, old in zip(parameters, before, strict=True):
        p.data.copy_(old)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(16, 8, generator=data)
        model(x).square().mean().backward()
        before = climb(parameters)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        descend(parameters, before)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
