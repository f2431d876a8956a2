"""Pretrained weights are loaded on rank 0 before the wrap, which copies them to the others.

run: --nproc-per-node 2
finds: nothing
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
    net = build()
    if rank == 0:
        path = pretrained()
        net.load_state_dict(torch.load(path))
        os.remove(path)
    model = DDP(net)

    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        x = torch.randn(16, 12)
        loss = (model(x) - x[:, :3]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 6 and rank == 0:  # weights are exchanged on one rank, and put back
            kept = {k: v.clone() for k, v in model.module.state_dict().items()}
            model.module.load_state_dict({k: torch.zeros_like(v) for k, v in kept.items()})
            model.module.load_state_dict(kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
