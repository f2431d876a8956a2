"""Rank 0 draws a picture after every step, and the others wait for it in the next backward.

run: --nproc-per-node 2
finds: DDP701 warning at `draw(loss)`
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def draw(loss):
    time.sleep(0.04)  # stands for a plot


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(96):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            draw(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
