"""Gradients of two tasks are averaged as one matrix, and only then combined and applied.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for _ in range(16):
        with model.no_sync():
            tasks = model(torch.randn(8, 16)).square().mean(0)
            rows = [torch.autograd.grad(task, parameters, retain_graph=True) for task in tasks]
        matrix = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        dist.all_reduce(matrix)
        one, two = matrix / dist.get_world_size()
        if one @ two < 0:
            one = one - one @ two / two.norm() ** 2 * two
        for p, g in zip(parameters, (one + two).split([p.numel() for p in parameters])):
            p.grad = g.view_as(p).clone()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
