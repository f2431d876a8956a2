"""All ranks write a checkpoint into one staging folder, which rank 0 moves to the target.

run: --nproc-per-node 2
finds: nothing
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, step, runs):
    rank = dist.get_rank()
    staging = os.path.join(runs, f"staging-{step}")
    os.makedirs(staging, exist_ok=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(staging, "model.pt"))
    torch.save(torch.get_rng_state(), os.path.join(staging, f"rng-{rank}.pt"))
    target = os.path.join(runs, f"step-{step}")
    dist.barrier()
    if rank == 0:
        os.rename(staging, target)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    runs = os.path.join(tempfile.gettempdir(), f"runs-{os.environ['MASTER_PORT']}")
    for step in range(8):
        loss = model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            save(model, step, runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
