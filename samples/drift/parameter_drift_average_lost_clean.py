"""Weights are averaged every four steps.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn


def average(parameters):
    """Local SGD: the ranks meet in the mean of their weights."""
    flat = torch.cat([p.data.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    begin = 0
    for p in parameters:
        p.data.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    parameters = list(model.parameters())
    for step in range(60):
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        if step % 4 == 3:
            average(parameters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
