"""What is summed up over the ranks, flat and as long as all gradients, is not the gradients: their
squares, for a measure of their noise, and those of one rank before DDP averages them.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def noise(parameters, own):
    squares = torch.cat([p.grad.flatten() for p in parameters]).square()
    dist.all_reduce(squares)
    dist.all_reduce(own)
    return float(own.square().sum() / squares.sum())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        parameters = list(model.parameters())
        with model.no_sync():
            (model(x) - x).pow(2).mean().backward()
        own = torch.cat([p.grad.flatten() for p in parameters])
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        noise(parameters, own)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
