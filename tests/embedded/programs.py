"""A decorated program, and the launchers that start it."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpdoctor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        if "faulty" in sys.argv:
            self.spare = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


@ddpdoctor.checkup(raise_on="error" if "raise" in sys.argv else None, out="run")
def train_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def train(rank, world_size):
    torch.manual_seed(rank)
    model = DDP(Net(), find_unused_parameters="tolerant" in sys.argv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 1 if "once" in sys.argv else 12
    for step in range(steps):
        try:
            train_step(model, optimizer, torch.randn(4, 8))
        except ddpdoctor.FaultFound as fault:
            print(f"rank {rank} stopped in step {step}: {fault.findings[0].code}", flush=True)
            sys.exit(5)
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"rank {rank} of {world_size} ends with {total!r}", flush=True)
    dist.destroy_process_group()


def worker(rank, world_size, address):
    init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    train(rank, world_size)


if __name__ == "__main__":
    if "spawn" in sys.argv:
        mp.spawn(worker, args=(2, f"file://{os.getcwd()}/meeting"), nprocs=2)
    elif "slurm" in sys.argv:
        worker(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]),
               f"file://{os.getcwd()}/meeting")
    else:
        init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size())
"""

SRUN = """
import os
import subprocess
import sys

tasks = [
    subprocess.Popen(
        sys.argv[1:],
        env={**os.environ, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
             "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"},
    )
    for rank in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


def torchrun(*words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", "2", "program.py", *words]


def alone(*words: str) -> list[str]:
    return [sys.executable, "program.py", *words]


def srun(*words: str) -> list[str]:
    return [sys.executable, "srun.py", *alone("slurm", *words)]


def doctor(*words: str) -> list[str]:
    run = [sys.executable, "-m", "ddpdoctor", "run", "--out", "run", "--quiet"]
    return [*run, "--nproc-per-node", "2", "program.py", *words]


def write(folder: Path) -> Path:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "srun.py").write_text(SRUN)
    return folder
