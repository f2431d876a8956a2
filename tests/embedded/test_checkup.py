"""The decorator for real, under every kind of launcher."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import alone, doctor, srun, torchrun, write
from sampling import inherited, run

import ddpdoctor
from ddpdoctor.report.findings import Report

PATIENCE_S = 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def reported(folder: Path) -> Report:
    """The report, once the monitor has written it."""
    deadline = time.monotonic() + PATIENCE_S
    while list(folder.glob(".monitor-*")) or not (folder / "findings.json").exists():
        assert time.monotonic() < deadline, "the monitor never ended"
        time.sleep(0.1)
    return ddpdoctor.load(folder)


@pytest.mark.parametrize("launch", [torchrun, srun, lambda *w: alone("spawn", *w)])
def test_the_fault_is_found_under_any_launcher(
    launch: Callable[..., list[str]], tmp_path: Path
) -> None:
    status, printed = run(launch("faulty", "once"), cwd=write(tmp_path))
    assert status == 0, printed[-3000:]
    assert len(re.findall(r"rank \d of 2 ends with", printed)) == 2
    report = reported(tmp_path / "run")
    (finding,) = [f for f in report.findings if f.severity.value == "error"]
    assert finding.check == "unused-parameter"
    assert finding.location is not None
    assert finding.location.source.strip() == "self.spare = nn.Linear(8, 8)"
    assert {(r.rank, r.state, r.steps) for r in report.ranks} == {
        (0, "finished", 1),
        (1, "finished", 1),
    }
    assert report.run.outcome == "completed"
    assert "error[DDP301]" in printed, "the report is printed before the last rank leaves"
    private = stat.S_IMODE(os.stat(tmp_path / "run").st_mode)
    assert private == 0o700


@pytest.mark.parametrize("launch", [torchrun, doctor])
def test_all_ranks_stop_at_the_same_call(launch: Callable[..., list[str]], tmp_path: Path) -> None:
    words = launch("faulty", "raise")
    status, printed = run(words, cwd=write(tmp_path), forked=True)
    assert status == 1
    stopped = re.findall(r"rank (\d) stopped in step (\d+): (DDP\d+)", printed)
    assert sorted(stopped) == [("0", "0", "DDP301"), ("1", "0", "DDP301")]
    report = reported(tmp_path / "run")
    assert [f.code for f in report.findings if f.severity.value == "error"] == ["DDP301"]


RESTARTED = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpdoctor

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x) if attempt else self.body(x) + self.spare(x)


@ddpdoctor.checkup(raise_on="error", out="run")
def train_step(step):
    if attempt == 0 and step == 2 and rank == 1:
        raise ValueError("bad batch")
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()


rank = int(os.environ["RANK"])
place = f"file://{os.getcwd()}/meeting-{attempt}"
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    try:
        train_step(step)
    except ddpdoctor.FaultFound as fault:
        print(f"rank {rank} stopped in step {step} of attempt {attempt}", flush=True)
        os._exit(0)
"""


@pytest.mark.exhaustive
def test_a_restart_is_recorded_apart_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RESTARTED)
    launcher = torchrun()
    status, printed = run(
        [*launcher[:-1], "--max-restarts", "1", "program.py"], cwd=tmp_path, forked=True
    )
    assert status == 0, printed[-3000:]
    stopped = re.findall(r"rank (\d) stopped in step (\d+) of attempt (\d+)", printed)
    assert sorted(stopped) == [("0", "0", "1"), ("1", "0", "1")]
    report = reported(tmp_path / "run")
    assert not (tmp_path / "run-2").exists()
    assert [r.steps for r in report.ranks] == [1, 1]
    found = {f.code for f in report.findings if f.severity.value == "error"}
    assert found == {"DDP301", "DDP606"}


def test_a_clean_program_goes_through_and_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    status, with_doctor = run(torchrun("raise"), cwd=tmp_path, forked=True)
    assert status == 0
    report = reported(tmp_path / "run")
    assert [f for f in report.findings if f.severity.value != "note"] == []
    plain = (tmp_path / "program.py").read_text().replace("@ddpdoctor.checkup", "# ")
    (tmp_path / "program.py").write_text(plain)
    _, without = run(torchrun(), cwd=tmp_path, forked=True)

    def results(printed: str) -> list[str]:
        return sorted(re.findall(r"rank \d of 2 ends with -?[\d.e]+\d", printed))

    assert len(results(without)) == 2
    assert results(with_doctor) == results(without)


BLOCKS = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


dist.init_process_group("gloo")
clean = DDP(nn.Linear(8, 8))
faulty = DDP(Net())
import ddpdoctor  # everything is there already, and all_reduce is copied

for model in (clean, faulty):
    try:
        with ddpdoctor.examine(out="run", raise_on="error", quiet=True) as examination:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            all_reduce(torch.ones(2))
        codes = [f.code for f in examination.report.findings if f.code[3] in "34"]
        print(f"quiet {codes}")  # one text: what two ranks print in parts gets mixed up
    except ddpdoctor.FaultFound as fault:
        codes = [f.code for f in fault.findings]
        print(f"found {codes} {fault.findings[0].ranks}")
assert not hasattr(torch.autograd.backward, "__ddpdoctor__")
with ddpdoctor.examine(out="run", quiet=True):
    if dist.get_rank() == 1:
        raise ValueError("bad row")
    all_reduce(torch.ones(2))
"""


def test_blocks_are_examined_one_by_one_though_all_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(BLOCKS)
    status, printed = run(torchrun(), cwd=tmp_path, forked=True)
    assert status == 1, printed[-3000:]
    assert printed.count("quiet []") == 2
    assert printed.count("found ['DDP301'] (0, 1)") == 2
    assert (tmp_path / "run-2" / "run.json").exists()
    (failure,) = reported(tmp_path / "run-3").findings
    assert (failure.check, failure.ranks) == ("first-failure", (1,))
    assert "ValueError: bad row" in printed, "the rank ends, though the other one waits for it"


ALONE = """
import ddpdoctor, torch
with ddpdoctor.examine(out="nothing") as examination:
    torch.ones(3).sum()
print("report", examination.report)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ddpdoctor.examine(out="run", quiet=True):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_a_block_of_one_process_without_a_group(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ALONE)
    status, printed = run(alone(), cwd=tmp_path)
    assert status == 0, printed
    assert printed.count("nothing to examine") == 1 and "report None" in printed
    assert not (tmp_path / "nothing").exists()
    (rank,) = reported(tmp_path / "run").ranks
    assert (rank.steps, rank.state) == (3, "finished")


def test_the_monitor_killed_costs_the_report_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    program = (tmp_path / "program.py").read_text()
    kill = """
        import glob, os, psutil, signal
        if step == 2 and rank == 0:
            for p in psutil.process_iter(["cmdline"]):
                if "ddpdoctor.embedded" in " ".join(p.info["cmdline"] or ()) and os.getcwd() in (
                        " ".join(p.info["cmdline"])):
                    p.kill()
        try:
"""
    (tmp_path / "program.py").write_text(program.replace("        try:\n", kill[1:], 1))
    status, printed = run(torchrun("raise"), cwd=tmp_path, forked=True)
    assert status == 0, printed[-3000:]
    assert printed.count("ends with") == 2
    assert ddpdoctor.load(tmp_path / "run").run.world_size == 2


def test_a_folder_that_cannot_be_written_is_not_the_run_s_problem(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "run").write_text("a file stands where the folder should")
    status, printed = run(torchrun("once"), cwd=tmp_path, forked=True)
    assert status == 0, printed[-3000:]
    assert printed.count("ends with") == 2
    assert "not examined" in printed


def test_environment_of_the_tests_is_clean() -> None:
    assert not [k for k in inherited() if k.startswith("DDPDOCTOR_")]


WRAPPED_BEFORE = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(8, 8))
spare = DDP(nn.Linear(8, 8))  # lives, and is not called
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
import ddpdoctor


@ddpdoctor.checkup(out="run", quiet=True)
def train_step(x):
    optimizer.zero_grad()
    {forward}(x).square().mean().backward()
    optimizer.step()


for _ in range(6):
    train_step(torch.randn(4, 8))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("forward", "checks"), [("model", []), ("model.module", ["ddp-bypassed"])])
def test_a_model_that_was_wrapped_before_the_examination(
    forward: str, checks: list[str], tmp_path: Path
) -> None:
    """The decorated function is defined below the wrap, and may never call the wrapper."""
    (tmp_path / "program.py").write_text(WRAPPED_BEFORE.replace("{forward}", forward))
    status, printed = run(torchrun(), cwd=tmp_path, forked=True)
    assert status == 0, printed[-3000:]
    findings = reported(tmp_path / "run").findings
    assert [f.check for f in findings if f.severity.value != "note"] == checks
