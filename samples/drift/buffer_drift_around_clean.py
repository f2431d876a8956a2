"""Rank 0 alone evaluates, with the model inside of the wrapper, and saves just that.

run: --nproc-per-node 2
finds: nothing
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def evaluate(model):
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for _ in range(6):
            x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            model.eval()
            evaluate(copy.deepcopy(model.module))
            evaluate(model.module)
            model.train()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
