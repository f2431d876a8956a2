"""Gradients are averaged by the program itself, and rank 0 alone resumes from a checkpoint.

run: --nproc-per-node 2
finds: DDP402 error at `model.load_state_dict(state["model"])`
"""

import torch
import torch.distributed as dist
from torch import nn


def resume(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def train(model, optimizer, data, steps):
    for _ in range(steps):
        x = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()


def checkpoint():
    """What an earlier run has saved."""
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def main():
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), checkpoint()
    model = nn.Linear(8, 1)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if rank == 0:
        resume(model, optimizer, state)
    train(model, optimizer, torch.Generator().manual_seed(rank), steps=40)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
