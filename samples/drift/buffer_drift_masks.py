"""A layer is pruned at random in training, and each rank draws a mask of its own.

run: --nproc-per-node 2
finds: DDP403 warning at `model = DDP(net)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.utils.prune as prune
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(12):
        if step == 4:
            prune.random_unstructured(net[0], "weight", amount=0.5)
        x = torch.randn(16, 12)
        optimizer.zero_grad()
        (model(x) - x[:, :3]).pow(2).mean().backward()
        optimizer.step()
    prune.remove(net[0], "weight")
    if rank == 0:
        path = os.path.join(tempfile.gettempdir(), f"pruned-{os.getpid()}.pt")
        torch.save(net.state_dict(), path)
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
