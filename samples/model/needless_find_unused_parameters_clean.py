"""Stochastic depth: a block is dropped in some steps, so the search is needed.

run: --nproc-per-node 2
finds: DDP301 note at `self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))`
"""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Stochastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, x, keep):
        x = self.stem(x)
        for block, kept in zip(self.blocks, keep):
            if kept:
                x = x + torch.relu(block(x))
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    model = DDP(Stochastic(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dice = random.Random(7)  # the same on every rank
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        keep = [dice.random() < 0.6 for _ in range(3)]
        x = torch.randn(32, 10)
        loss = nn.functional.mse_loss(model(x, keep), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
