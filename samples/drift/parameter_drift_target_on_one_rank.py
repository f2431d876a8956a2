"""Rank 0 alone updates the target network, against which all ranks train.

run: --nproc-per-node 2
finds: DDP402 error at `mine.mul_(rate).add_(theirs, alpha=1 - rate)`
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.body(x)


class Online(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.predictor = nn.Linear(8, 8)

    def forward(self, x):
        return self.predictor(self.encoder(x))


@torch.no_grad()
def follow(target, online, rate=0.99):
    for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
        mine.mul_(rate).add_(theirs, alpha=1 - rate)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    online = DDP(Online(Encoder()))
    target = copy.deepcopy(online.module.encoder).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.05)
    for _ in range(30):
        x = torch.randn(32, 16)
        with torch.no_grad():
            wanted = target(x + 0.1 * torch.randn_like(x))
        loss = 2 - 2 * F.cosine_similarity(online(x), wanted, dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            follow(target, online.module.encoder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
