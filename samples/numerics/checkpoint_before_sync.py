"""Rank 0 writes the best model; the others load it without waiting for it.

run: --nproc-per-node 2
finds: DDP803 warning at `model.module.load_state_dict(torch.load(best, map_location="cpu"))`
"""

import os
import tempfile
import time

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
    else:
        time.sleep(0.5)  # "long enough"
    model.module.load_state_dict(torch.load(best, map_location="cpu"))
    dist.barrier()
    if rank == 0:
        os.remove(best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
