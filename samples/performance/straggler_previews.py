"""Rank 0 writes previews after every eighth step, which takes as long as forty steps.

run: --nproc-per-node 2
finds: DDP701 warning at `write_previews(loss)`
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def write_previews(loss):
    time.sleep(0.4)  # stands for a grid of images


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(96):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0 and dist.get_rank() == 0:
            write_previews(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
