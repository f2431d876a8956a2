"""Gradients are averaged by hand, one line too late: each rank has stepped with its own.

run: --nproc-per-node 2
finds: DDP305 error at `optimizer.step()`
"""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
        average_gradients(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
