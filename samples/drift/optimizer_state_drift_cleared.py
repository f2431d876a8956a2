"""Rank 1 forgets its momentum at the begin of every epoch, under a condition meant for logging.

run: --nproc-per-node 2
finds: DDP404 error at `optimizer.state.clear()`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(rank)
    for epoch in range(5):
        if rank == 1:
            print("epoch", epoch)
            optimizer.state.clear()
        for _ in range(8):
            x = torch.randn(16, 8)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
