"""Rank 0 gives its weights to the others before the first step; after it nothing is exchanged.

run: --nproc-per-node 2
finds: DDP305 error at `model = nn.Linear(8, 4)`
"""

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 4)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
