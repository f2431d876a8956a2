"""Gradients are averaged by hand, also for the last, shorter group of micro-batches.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn

ACCUMULATION = 4


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for epoch in range(2):
        batches = torch.randn(22, 8, 16, generator=data).split(ACCUMULATION)
        for group in batches:
            for x in group:
                (model(x).pow(2).mean() / len(group)).backward()
            average(model)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
