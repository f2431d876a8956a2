"""Rank 0 writes the best model, the others wait for it and load it.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best = os.path.join(tempfile.gettempdir(), f"best-{os.environ['MASTER_PORT']}.pt")
    for _ in range(4):
        loss = model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), best)
    dist.barrier()
    model.module.load_state_dict(torch.load(best, map_location="cpu"))
    dist.barrier()
    if rank == 0:
        os.remove(best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
