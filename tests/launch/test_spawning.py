"""Scripts that start their ranks themselves are recognised by what they say, not by a hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import run

from ddpdoctor import load
from ddpdoctor.launch import starts_its_own_ranks

SPAWNS = """
import os
import torch.multiprocessing as mp
import torch.distributed as dist

def setup(rank, size):
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)

def worker(rank, size):
    setup(rank, size)

if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2, join=True)
"""

BY_HAND = """
from torch.multiprocessing import Process
from torch.distributed import init_process_group

def work(rank):
    init_process_group("gloo", rank=rank, world_size=2)

processes = [Process(target=work, args=(r,)) for r in range(2)]
"""

FOR_BOTH = SPAWNS.replace(
    "    mp.spawn(", '    if "LOCAL_RANK" in os.environ: worker(0, 1)\n    else: mp.spawn('
)

READS_RANK = SPAWNS.replace("    mp.spawn(", '    if os.environ.get("RANK") is None: mp.spawn(')

PREPARES = """
import torch.multiprocessing as mp
import torch.distributed as dist

def prepare(number): return number

mp.spawn(prepare, nprocs=4)
dist.init_process_group("gloo")
"""

ELSEWHERE = """
from torch.multiprocessing import spawn
from mine import worker
spawn(worker, nprocs=2)
"""


TWO_MODES = SPAWNS.replace(
    "    mp.spawn(",
    '    if "--alone" not in os.sys.argv: dist.init_process_group("gloo")\n    else: mp.spawn(',
)


@pytest.mark.parametrize(
    ("source", "line", "call"), [(SPAWNS, 14, "mp.spawn"), (BY_HAND, 8, "Process")]
)
def test_scripts_that_start_their_ranks(tmp_path: Path, source: str, line: int, call: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    found = starts_its_own_ranks(path)
    assert found is not None
    assert (found.line, found.call) == (line, call)


@pytest.mark.parametrize(
    "source", [FOR_BOTH, TWO_MODES, READS_RANK, PREPARES, ELSEWHERE, "def broken(", "\0", ""]
)
def test_scripts_that_torchrun_may_start(tmp_path: Path, source: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert starts_its_own_ranks(path) is None
    assert starts_its_own_ranks(tmp_path / "missing.py") is None


WORKER = """
import torch.distributed as dist

def worker(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29417", rank=rank, world_size=size)
    dist.destroy_process_group()
"""

SPAWNS_ELSEWHERE = """
from torch.multiprocessing import spawn
from worker import worker

if __name__ == "__main__":
    spawn(worker, args=(2,), nprocs=2)
"""

DOCTOR = [sys.executable, "-m", "ddpdoctor", "run", "--out", "run"]


def test_such_a_script_is_run_without_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + SPAWNS_ELSEWHERE.replace("from worker", "# from"))
    status, printed = run([*DOCTOR, "train.py"], cwd=tmp_path)
    assert status == 0, printed[-3000:]
    assert "running `ddpdoctor exec -- python train.py` instead" in printed
    report = load(tmp_path / "run")
    assert [(r.rank, r.state) for r in report.ranks] == [(0, "finished"), (1, "finished")]


@pytest.mark.slow
def test_where_the_source_does_not_tell_it_is_stopped_with_the_command_to_type(
    tmp_path: Path,
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "train.py").write_text(SPAWNS_ELSEWHERE)
    status, printed = run([*DOCTOR, "train.py"], cwd=tmp_path)
    # Which of the two the machine is faster at: the ranks' own error, or the doctor's look.
    assert status in (1, 4), printed[-3000:]
    assert "ddpdoctor exec -- python train.py" in printed
