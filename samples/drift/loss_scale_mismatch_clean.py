"""A sum over equal batches, and a mean over unequal ones.

run: --nproc-per-node 2
finds: nothing
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(6):
        size = 8 if step < 3 else 5 + rank
        x, y = torch.randn(size, 6), torch.randn(size, 1)
        optimizer.zero_grad()
        losses = (model(x) - y).square()
        (losses.sum() if step < 3 else losses.mean()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
