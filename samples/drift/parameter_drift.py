"""Rank 0 loads pretrained weights after the model was wrapped: the others keep their own.

run: --nproc-per-node 2
finds: DDP402 error at `model.module.load_state_dict(torch.load(path))`
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 3))


def pretrained():
    path = os.path.join(tempfile.gettempdir(), f"pretrained-{os.getpid()}.pt")
    torch.manual_seed(1234)
    torch.save(build().state_dict(), path)
    return path


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(build())
    if rank == 0:
        path = pretrained()
        model.module.load_state_dict(torch.load(path))
        os.remove(path)

    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        x = torch.randn(16, 12)
        loss = (model(x) - x[:, :3]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
