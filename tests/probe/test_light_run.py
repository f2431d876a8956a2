"""Light steps leave no trace: what they put off is done before anybody reads it, and a fault in one
of them is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sampling import inherited
from torch import nn

from ddpdoctor.events import NotObserved
from ddpdoctor.probe.recording import recorder as recording
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.accumulate_grad import LastGradient, nodes_of
from ddpdoctor.probe.training.steady_state import Plan
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.report.findings import Finding, Report
from ddpdoctor.storage.run_folder import EventWriter

PROGRAM = """
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

fault, at = sys.argv[1], 745  # light whatever the period, as a rule
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
steady = sys.modules["ddpdoctor.probe.training.steady_state"].steady_state
for step in range(800):
    torch.manual_seed(1000 * step + rank)
    x, now = torch.randn(32, 64), step == at
    if now and rank == 0:
        print("light:", bool(steady.expected and steady.expected.light))
    if fault == "nan" and now and rank:
        x[0, 0] = float("nan")
    if fault.startswith("rate") and now and rank:
        schedule.step()
    if fault == "rate-undone" and now or fault == "rate" and step == at + 16:
        optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.zero_grad()
    with model.no_sync() if fault == "unsynced" and now else contextlib.nullcontext():
        model(x).square().mean().backward()
    if fault == "skipped" and now and rank:
        continue
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.flaky(reruns=2)  # a watcher may want just this step
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("unsynced", "DDP407"),
        pytest.param("skipped", "DDP402", marks=pytest.mark.exhaustive),
        pytest.param("nan", "DDP801", marks=pytest.mark.exhaustive),
        pytest.param("rate", "DDP405", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_in_one_light_step_is_found(fault: str, code: str, tmp_path: Path) -> None:
    found = run(fault, tmp_path)
    assert code in found
    steps = found[code].steps
    assert steps is not None
    assert steps.first is not None
    assert 745 <= steps.first < 800, "to the window"


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_rate_that_a_scheduler_set_and_the_program_set_back(tmp_path: Path) -> None:
    """No step used it."""
    assert not run("rate-undone", tmp_path)


def run(fault: str, tmp_path: Path) -> dict[str, Finding]:
    """What is found in the program with a fault."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "run", "--out", str(tmp_path / "run"), "--no-live",
         "--nproc-per-node", "2", str(script), fault],
        cwd=tmp_path, env=inherited(), capture_output=True, text=True, timeout=380,
    )  # fmt: skip
    assert "light: True" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    report = msgspec.json.decode((tmp_path / "run" / "findings.json").read_bytes(), type=Report)
    return {f.code: f for f in report.findings}


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    monkeypatch.setattr(recording.current, "recorder", made)
    yield made
    made.behind = None


def test_whatever_else_the_probe_does_catches_up_first(rank: Recorder) -> None:
    done: list[str] = []
    rank.behind = lambda: done.append("behind")
    recording.run_hook(rank, "part", "", lambda recorder: done.append("hook"))
    assert done == ["behind", "hook"]
    assert recording.current_recorder() is rank
    rank.emit(NotObserved(at=0.0, check="", reason=""))
    assert done.count("behind") >= 3


def test_the_last_gradient_of_a_backward() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    parameters: list[Any] = list(module.parameters())
    model = Model(0, module, parameters, [0, 1, 2, 3])
    last = LastGradient()
    assert not last.follow(model), "it is not known yet"
    model.last_position = 0
    node = nodes_of(parameters[:1])  # DDP keeps it, too
    assert last.follow(model)
    module(torch.ones(2, 4)).sum().backward()
    assert last.at > 0
    last.stop()
    last.at = 0.0
    module(torch.ones(2, 4)).sum().backward()
    assert last.at == 0
    del node


def test_long_calls_of_light_steps_are_counted_one_by_one() -> None:
    """Sums hide that a loader pauses once in an epoch; what a backward waited is known later."""
    ring = SimpleNamespace(step=7, count=0, elsewhere=0.0, mark_phase=lambda *_: None)
    loads, backward = (
        SimpleNamespace(
            logged=-1, site=n, backward=b, inside_s=0.0, before_s=0.0, following=None, wall_s=0.0
        )
        for n, b in ((3, None), (4, object()))
    )
    plan: Any = SimpleNamespace(
        ring=ring, gaps=[], long=[], loads=loads, owed=None, wraps=0, first=loads, elsewhere=0.0
    )
    for call, began, ended in ((loads, 1.0, 1.4), (loads, 1.5, 1.51), (backward, 1.52, 2.0)):
        plan.began, plan.left = began, began
        Plan.leave(plan, call, ended)
    assert plan.long == [(loads, pytest.approx(0.4), 7)]
    assert plan.gaps == []
