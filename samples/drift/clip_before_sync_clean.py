"""Clipping where it belongs, and of gradients that are never averaged: the norm of each micro-batch
is only measured, an abandoned micro-batch is cleared, and local steps are clipped for themselves.

run: --nproc-per-node 2
finds: nothing
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def loss_of(model, accumulate=1):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    return nn.functional.cross_entropy(model(x), y) / accumulate


def main(accumulate=4, updates=6):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(accumulate * updates):
        last = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss_of(model, accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
