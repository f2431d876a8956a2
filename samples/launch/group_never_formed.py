"""Launched with torchrun, but nobody calls init_process_group: two models are trained.

run: --nproc-per-node 2
finds: DDP106 error at `optimizer.step()`
"""

import os

import torch
from torch import nn


def main():
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        x, y = torch.randn(8, 16), torch.randint(0, 2, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
