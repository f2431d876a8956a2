"""Rank 0 saves the model, every rank its own random state, and ranks take turns at a summary.

run: --nproc-per-node 2
finds: nothing
"""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, folder):
    rank = dist.get_rank()
    if rank == 0:
        temporary = folder / "last.pt.tmp"
        torch.save(model.module.state_dict(), temporary)
        os.replace(temporary, folder / "last.pt")
    torch.save(torch.get_rng_state(), folder / f"rng-{rank}.pt")
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    folder = Path(tempfile.gettempdir()) / f"turns-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    model = DDP(nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        save(model, folder)
        with open(folder / "train.log", "a") as log:
            log.write(f"rank {rank}: {loss.item():.3f}\n")
    summary = folder / "summary.json"
    for turn in range(dist.get_world_size()):
        if turn == rank:
            known = json.loads(summary.read_text()) if turn else {}
            summary.write_text(json.dumps({**known, rank: loss.item()}))
        dist.barrier()
    model.module.load_state_dict(torch.load(folder / "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
