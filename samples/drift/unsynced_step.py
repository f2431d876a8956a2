"""Gradient accumulation that is off by one: the micro-batch that steps is not synchronised.

run: --nproc-per-node 2
finds: DDP407 error at `with model.no_sync() if i % ACCUMULATE else nullcontext():`
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_fn = nn.CrossEntropyLoss()
    for i in range(24):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        with model.no_sync() if i % ACCUMULATE else nullcontext():
            loss = loss_fn(model(x), y) / ACCUMULATE
            loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
