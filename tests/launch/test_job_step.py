"""Commands that a scheduler starts as the tasks of one job step: `srun ddpdoctor exec -- ...`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import LIMIT_S, inherited

from ddpdoctor.launch.job_step import Task, this_task
from ddpdoctor.storage.run_folder import FolderError, RunFolder, RunInfo

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, Task("slurm-7.1", 1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM, None),  # in the script of a batch job
        ({"PMIX_NAMESPACE": "x.1", "OMPI_COMM_WORLD_SIZE": "2"}, Task("mpi-x.1", 0)),
        ({"PMIX_NAMESPACE": "x.1", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_which_task_it_is(environ: dict[str, str], task: Task | None) -> None:
    assert this_task(environ) == task


def info(step: str, ended: str | None = None) -> RunInfo:
    return RunInfo(schema_version=1, id=step, command=["x"], started_at="now", ended_at=ended,
                   tool_version="0")  # fmt: skip


def test_tasks_share_a_folder(tmp_path: Path) -> None:
    out, task = tmp_path / "run", Task("slurm-7.1", 0)
    made = task.folder(out, "train")
    assert task.folder(out, "train").path == made.path, "before anything is written"
    made.write_info(info(task.step))
    assert task.folder(out, "train").path == made.path
    assert [task.is_first(made), task.is_first(made)] == [True, False]
    assert Task(task.step, 1).is_first(made)
    with pytest.raises(FolderError):
        Task("slurm-8.0", 0).folder(out, "train")
    RunFolder(out).write_info(info(task.step, "then"))
    with pytest.raises(FolderError):
        task.folder(out, "train")


TRAIN = """
import os, sys, time, torch, torch.distributed as dist
os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if dist.get_rank() == 1 else 0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    while HANGS and step == 5 and dist.get_rank() == 1:
        time.sleep(1)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_the_first_task_examines_all_ranks(hangs: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"HANGS = {hangs}{TRAIN}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    step = {**SLURM, "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    command = [sys.executable, "-m", "ddpdoctor", "exec", "--out", "out", "--no-live",
               "--hang-after", "3", "--on-hang", "stop", "--", sys.executable,
               "train.py"]  # fmt: skip
    tasks = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**inherited(), **step, **address, "SLURM_PROCID": str(n)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        said = [task.communicate(timeout=LIMIT_S)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert sum("examining this run" in text for text in said) == 1, said
    told = json.loads((tmp_path / "out" / "findings.json").read_text())
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    codes = [f["code"] for f in told["findings"] if f["severity"] == "error"]
    assert ("DDP603" if hangs else "DDP405") in codes, said
    statuses = {task.returncode for task in tasks}
    # A correct script aborts at its end now and then.
    assert statuses == {-15, 4} if hangs else statuses <= {0, -6, 134}, said
