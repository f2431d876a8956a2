"""Rank 0 alone loads the optimizer's state; a schedule that goes on from a later epoch needs it.

run: --nproc-per-node 2
finds: DDP606 error at `scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, epoch)`
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def checkpoint():
    optimizer = torch.optim.SGD(nn.Linear(8, 2).parameters(), lr=0.05)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer.state_dict(), "epoch": 3}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = checkpoint()
    if state is not None and rank == 0:
        optimizer.load_state_dict(state["optimizer"])
    epoch = state["epoch"]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, epoch)
    torch.manual_seed(rank)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
