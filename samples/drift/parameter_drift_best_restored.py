"""Rank 0 goes back to its best weights when training is over; then all ranks evaluate.

run: --nproc-per-node 2
finds: DDP402 error at `model.module.load_state_dict(weights)`
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def batch():
    x = torch.randn(32, 12)
    return x, (x[:, 0] * x[:, 1] > 0).long()


@torch.no_grad()
def evaluate(model):
    model.eval()
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    torch.manual_seed(rank)
    best, weights = None, None
    for epoch in range(4):
        for _ in range(6):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss = evaluate(model)
        if epoch == 1:  # the best epoch, say
            best = loss
            if rank == 0:
                weights = copy.deepcopy(model.module.state_dict())
    if weights is not None:
        model.module.load_state_dict(weights)
    print(rank, best, evaluate(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
