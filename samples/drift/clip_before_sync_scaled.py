"""Gradient accumulation whose micro-batches are scaled to unit norm by hand, before DDP averages.

run: --nproc-per-node 2
finds: DDP412 warning at `(nn.functional.cross_entropy(model(x), y) / accumulate).backward()`
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def normalise(gradients):
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    for gradient in gradients:
        gradient.div_(norm)


def main(accumulate=4, updates=6):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(accumulate * updates):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        last = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
        normalise([p.grad for p in model.parameters()])
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
