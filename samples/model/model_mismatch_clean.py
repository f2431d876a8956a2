"""Layers registered in sorted order, the same on every rank.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def enabled(rank):
    # What iterating over a set of strings gives, made certain: the order depends on the process.
    names = ["audio", "image", "text"]
    return names if rank == 0 else names[1:] + names[:1]


class Mixture(nn.Module):
    def __init__(self, names, width=12):
        super().__init__()
        self.experts = nn.ModuleDict()
        for name in sorted(names):
            self.experts[name] = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(sum(self.experts[n](x) for n in sorted(self.experts)))


def main():
    dist.init_process_group("gloo")
    model = DDP(Mixture(enabled(dist.get_rank())))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
