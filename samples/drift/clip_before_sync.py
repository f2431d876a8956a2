"""Gradient accumulation that clips after every micro-batch, before DDP has averaged anything.

run: --nproc-per-node 2
finds: DDP412 warning at `nn.utils.clip_grad_norm_(model.parameters(), 0.1)`
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


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
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
