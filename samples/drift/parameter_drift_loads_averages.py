"""Every rank goes on from averages of the weights that rank 0 alone updates.

run: --nproc-per-node 2
finds: DDP402 error at `model.module.load_state_dict(averages.state_dict())`
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def average(kept, model, rate=0.9):
    mine = dict(kept.named_parameters())
    for name, value in model.named_parameters():
        mine[name].mul_(rate).add_(value, alpha=1 - rate)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    averages = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _epoch in range(3):
        for _ in range(8):
            x = torch.randn(32, 16)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                average(averages, model.module)
        model.module.load_state_dict(averages.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
