"""How often ranks of a correct program die while they leave, with and without the doctor.

    python tests/leaving.py --times 100 [--fresh]

torch itself aborts now and then when an interpreter ends, or stands still: threads of gloo and of
the store are still at work, and one that lets go of a tensor wants the lock that the destructor of
the group holds while it waits for that thread. Whoever keeps objects alive changes the odds.
Ranks are forked from a process that has imported torch (up to a hundred pairs a minute); `--fresh`
starts interpreters.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = ("destroyed", "left")
"""Whether the program ends with `destroy_process_group`."""
ROUND = 10
STUCK_S = 20


def train(meeting: str, rank: int, program: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.ones(2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        dist.all_reduce(total)
    if program == "destroyed":
        dist.destroy_process_group()


def pairs(times: int, program: str, fresh: bool) -> None:
    """Run two ranks again and again; prints one line of exit statuses for each pair."""
    # Once, for all that are forked; DDP's constructor imports torch._dynamo.
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    for _ in range(times):
        meeting = tempfile.mktemp(dir=os.getcwd())
        started = []
        for rank in (0, 1):
            if fresh:
                given = ["--rank", str(rank), "--meeting", meeting, program]
                started.append(subprocess.Popen([sys.executable, __file__, *given]).pid)
                continue
            child = os.fork()
            if not child:
                train(meeting, rank, program)
                return  # to the interpreter's own end
            started.append(child)
        print("ended", *(ended(pid) for pid in started), flush=True)


def ended(pid: int) -> int:
    """Waits for a process; its status, -9 where it was stuck and had to be killed."""
    deadline = time.monotonic() + STUCK_S
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline += STUCK_S
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1])


def measured(times: int, program: str, fresh: bool) -> dict[bool, collections.Counter[int]]:
    """Exit statuses of ranks, without (False) and with (True) the doctor, taken in turns."""
    found = {side: collections.Counter[int]() for side in (False, True)}
    for done in range(0, times, ROUND):
        for doctor in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                count = str(min(ROUND, times - done))
                words = [sys.executable, __file__, "--pairs", count, program]
                words += ["--fresh"] * fresh
                if doctor:
                    examine = [sys.executable, "-m", "ddpdoctor", "exec", "--quiet"]
                    words = [*examine, "--out", str(Path(folder, "run")), "--", *words]
                ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            for line in ended.stdout.splitlines():
                if line.startswith("ended "):
                    found[doctor].update(map(int, line.split()[1:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meeting")
    parser.add_argument("program", nargs="?")
    asked = parser.parse_args()
    if asked.rank is not None:
        train(asked.meeting, asked.rank, asked.program)
    elif asked.pairs:
        pairs(asked.pairs, asked.program, asked.fresh)
    else:
        for program in PROGRAMS:
            for doctor, ends in measured(asked.times, program, asked.fresh).items():
                told = ", ".join(f"{n} x {status}" for status, n in sorted(ends.items()))
                print(f"{program:9} {'doctor' if doctor else 'alone':6} {told}", flush=True)


if __name__ == "__main__":
    main()
