"""Every rank writes a checkpoint into a staging folder of its own and moves that to one target.

run: --nproc-per-node 2
finds: DDP802 error at `os.rename(staging, target)`
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, step, runs):
    rank = dist.get_rank()
    os.makedirs(runs, exist_ok=True)
    staging = tempfile.mkdtemp(prefix="staging-", dir=runs)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(staging, "model.pt"))
    torch.save(torch.get_rng_state(), os.path.join(staging, f"rng-{rank}.pt"))
    target = os.path.join(runs, f"step-{step}")
    os.rename(staging, target)


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
