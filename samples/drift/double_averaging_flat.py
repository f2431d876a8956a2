"""Gradients that DDP has averaged are summed up once more, in a flat copy that is put back.

run: --nproc-per-node 2
finds: DDP409 error at `dist.all_reduce(flat)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def synchronise(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        synchronise(list(model.parameters()))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
