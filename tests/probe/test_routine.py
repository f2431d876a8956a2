"""Steps that are like the ones before pass with less ado; nothing is recorded otherwise for it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sampling import inherited

from ddpdoctor.events import (
    Bypassed,
    CallBlock,
    CallRun,
    CallSite,
    NonFinite,
    ParametersChanged,
    Site,
    StepDone,
    SyncPattern,
    UnusedParameters,
)
from ddpdoctor.probe.recording import hooks
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training import records, steady_state
from ddpdoctor.probe.training.forwards import Forwards
from ddpdoctor.probe.training.limits import ALIKE, FAST_PATH_AFTER
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.training.steady_state import ObservedCall, Stage, SteadyState
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.gradients.limits import AGAIN_AT
from ddpdoctor.report.findings import Report
from ddpdoctor.storage.run_folder import EventWriter, Lines

PROGRAM = """
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
routine = sys.modules["ddpdoctor.probe.training.steady_state"]
routine.FAST_PATH_AFTER = int(sys.argv[1])
light = sys.modules["ddpdoctor.probe.training.light_steps"]
lighten = sys.argv[2] == "light"
sys.modules["ddpdoctor.probe.watchers.timing.idle_time"].SHORTEST_S = 1e9
sys.modules["ddpdoctor.probe.watchers.losses.loss_scaling"].LOSSES_ENOUGH = 2
light.LightSteps.after = lambda *of: 100 * (lighten and not light.watched())
sys.modules["ddpdoctor.probe.training.lifecycle"].looked_at = lambda forward: forward % 16 == 0
passed = 0


def back(loss, **more):
    loss.backward(**more)


def whole(model, x):
    back(model(x).square().mean())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.late = nn.Identity()

    def forward(self, x, fail=False, whole=True):
        if fail:
            raise ValueError("a bad batch")
        x = self.late(x)
        return self.b(self.norm(self.a(x))) if whole else self.norm(self.a(x))


def train(at, steps=16, late=12):
    global passed
    routine.steady_state.reset()
    torch.manual_seed(0)
    model = DDP(Net())
    halves = list(model.parameters())
    used = halves[:3] if at == "two optimizers" else halves
    optimizer = torch.optim.SGD(used, lr=0.01)
    second = torch.optim.SGD(halves[3:], lr=0.01)
    other = nn.Linear(4, 1)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, 4)
        now = step == late
        plan = routine.steady_state.expected
        passed += plan is not None and (not lighten or plan.light > 0)
        if at == "collective" and step % 2:
            dist.all_reduce(torch.ones(1))
        if at == "evaluation" and step % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        if at == "not finite" and now and rank:
            x[1, 1] = float("nan")
        optimizer.zero_grad()
        if at.startswith("accumulating"):
            count = 3 if not now else {"cut short": 2, "longer": 4}.get(at.partition(", ")[2], 3)
            for part in range(count):
                inside = now and at.endswith("the wrong one")
                last = part == 2 - inside
                with contextlib.nullcontext() if last else model.no_sync():
                    back(model(x).square().mean() / 3)
            optimizer.step()
            continue
        if at == "sharpness":
            back(model(x).square().mean())
            optimizer.zero_grad()
            back(model(x + 1).square().mean())
            optimizer.step()
            continue
        if at == "two optimizers":
            back(model(x).square().mean())
            optimizer.step()
            if not now:
                second.step()
            continue
        if at == "two callers":
            if step < late:
                whole(model, x)
            else:
                whole(model, x + 1)
            optimizer.step()
            continue
        if at == "a new layer" and now:
            model.module.late = nn.Linear(4, 4)
        if at == "in pairs":
            back((model(x) - model(x + 1)).square().mean())
            optimizer.step()
            continue
        if at == "forward fails" and now:
            with contextlib.suppress(ValueError):
                model(x, fail=True)
            continue
        with model.no_sync() if at.endswith("no_sync") and now else contextlib.nullcontext():
            try:
                loss = model(x, whole=not (at == "a part unused" and now)).square().mean()
            except RuntimeError:  # torch notices in the next step
                break
            if at == "both in no_sync" and now:
                back(loss)
                optimizer.step()
                continue
        if at == "two forwards" and now:
            loss = loss + model(x).square().mean()
        if at == "another backward" and now:
            back(other(x).sum())
        if at == "flag" and now:
            model.require_backward_grad_sync = False
        if at == "backward fails" and now:
            hooked = loss.register_hook(lambda g: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                back(loss)
            hooked.remove()
            loss = model(x).square().mean()
        if at == "functional" and now:
            names = [p for p in model.parameters()]
            for p, g in zip(names, torch.autograd.grad(loss, names)):
                p.grad = g
        elif at == "twice" and now:
            back(loss, retain_graph=True)
            back(loss)
        elif at == "around the wrapper" and now:
            back(loss)
            back(model.module(x).square().mean())
        else:
            back(loss)
        model.require_backward_grad_sync = True
        if at == "no step" and now:
            continue
        if at == "step fails" and now:
            hooked = optimizer.register_step_pre_hook(lambda *a: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step()
            hooked.remove()
            continue
        optimizer.step()
        if at == "another optimizer" and now:
            torch.optim.SGD(model.parameters(), lr=0.01).step()


for at in sys.argv[4:]:
    train(at, *range(int(sys.argv[3]), 0, -4)[:2])
    if at in ("", "accumulating", "in pairs", "sharpness"):
        needed = routine.steady_state._repeats_needed
        assert needed == routine.ALIKE, f"{at}: expected, and then none"
    dist.barrier()
if rank == 0:
    print("passed as routine:", passed, flush=True)
dist.destroy_process_group()
"""

USUAL = (
    "", "collective", "evaluation", "accumulating", "in pairs", "sharpness", "two optimizers",
    "two callers",
)  # fmt: skip
UNUSUAL = (
    "no_sync", "both in no_sync", "a part unused", "two forwards", "another backward", "flag",
    "functional", "twice", "no step", "around the wrapper", "step fails", "another optimizer",
    "forward fails", "not finite", "accumulating, cut short", "accumulating, longer",
    "accumulating, the wrong one", "a new layer",
)  # fmt: skip


EMITTED = (SyncPattern, Bypassed, NonFinite, UnusedParameters, ParametersChanged)


def recorded(folder: Path, rank: int) -> dict[str, Any]:
    """What the run's record says that must not depend on how the steps passed."""
    events = list(Lines(folder / f"rank-{rank}.jsonl").events())
    lines = {e.id: e.line for e in events if isinstance(e, Site)}
    blocks = {e.id: e.codes for e in events if isinstance(e, CallBlock)}
    callers = {e.id: [lines[p.site] for p in e.places] for e in events if isinstance(e, CallSite)}
    found: dict[str, Any] = {"calls": Counter(), "steps": Counter()}
    for kind in EMITTED:
        found[kind.__name__] = []
    for event in events:
        if isinstance(event, CallRun):
            for place in blocks[event.block][1::2]:
                found["calls"][(event.group, *callers[place])] += event.repeat
        elif isinstance(event, StepDone):
            found["steps"]["taken", event.optimizer] += event.count
            found["steps"]["backwards", event.optimizer] += event.backwards
            found["steps"]["synced", event.optimizer] += event.synced
        elif isinstance(event, SyncPattern) and event.step in AGAIN_AT:
            continue  # once more what was recorded before, and not on the fast path
        elif isinstance(event, EMITTED):
            told = msgspec.structs.asdict(event)
            for name in ("at", "backward_s", "exposed_s"):
                told.pop(name, None)
            told = {k: lines.get(v, v) if k.endswith("site") else v for k, v in told.items()}
            found[type(event).__name__].append(told)
    assert not any("ProbeTrouble" in type(e).__name__ for e in events)
    return found


def run(
    folder: Path, first: int, light: bool, steps: int, *variants: str
) -> tuple[int, list[dict[str, Any]], list[Any]]:
    script = folder / "train.py"
    script.write_text(PROGRAM)
    out = folder / f"run-{first}-{light}"
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "run", "--out", str(out), "--no-live",
         "--nproc-per-node", "2", str(script), str(first), "light" * light, str(steps), *variants],
        cwd=folder, env=inherited(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert "passed as routine:" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    passed = int(done.stdout.partition("passed as routine:")[2].split()[0])
    report = msgspec.json.decode((out / "findings.json").read_bytes(), type=Report)
    findings = [
        (f.code, f.severity, f.ranks, f.location and f.location.line, f.steps)
        for f in report.findings
    ]
    return passed, [recorded(out, n) for n in range(2)], findings


EVERY = USUAL + UNUSUAL


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize(("variants", "light"), [
    (EVERY, False),
    (EVERY[::3], True),
    pytest.param(EVERY[1::3], True, marks=pytest.mark.exhaustive),
    pytest.param(EVERY[2::3], True, marks=pytest.mark.exhaustive),
], ids=["fast", "light", "light, more", "light, the rest"])  # fmt: skip
def test_the_record_is_the_same(variants: tuple[str, ...], light: bool, tmp_path: Path) -> None:
    steps = 160 if light else 16  # the watchers of the first steps want every one
    passed, routine_record, routine_findings = run(tmp_path, 3, light, steps, *variants)
    never, record, findings = run(tmp_path, 10**9, False, steps, *variants)
    assert passed > 2 * len(variants)
    assert never == 0
    assert routine_record == record
    assert routine_findings == findings


def test_parameters_that_are_made_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleOrigins.current, "registrations", 7)
    assert Forwards.current._due(1000), "made before the first look"
    assert not Forwards.current._due(1000)
    ModuleOrigins.current.registrations += 1
    assert Forwards.current._due(1001)
    assert not Forwards.current._due(1002)
    assert Forwards.current._due(1024), "looked at in any case"


# --- what is expected ---------------------------------------------------------------------------


def model(number: int) -> Any:
    return SimpleNamespace(number=number, group=0, wrapper=lambda: None, sampled=[lambda: None])


MODEL, OTHER = model(0), model(1)
OPTIMIZER: Any = SimpleNamespace(steps=10**6)
ACTIVE: Any = SimpleNamespace(call_log=SimpleNamespace(ring=None, recurring=lambda *what: None))


def forward(site: int, sync: bool = True, of: Any = MODEL) -> ObservedCall:
    return ObservedCall(records.Forward, of, site, sync)


def backward(site: int, sync: bool = True, of: Any = MODEL) -> ObservedCall:
    return ObservedCall(records.Backward, of, site, sync)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})


def steps(
    watched: SteadyState, count: int, *history: Any, optimizer: Any = OPTIMIZER, more: Any = ()
) -> bool:
    for _ in range(count):
        for part in history or (forward(1), backward(2)):
            watched.observe(part)
        for one in (optimizer, *more):
            watched.learn(ACTIVE, one, 3)
    return watched.expected is not None


def test_steps_alike_make_a_routine() -> None:
    watched = SteadyState()
    assert not steps(watched, ALIKE)
    assert steps(watched, 1)


ACCUMULATING = [forward(1, False), backward(2, False)] * 3 + [forward(1), backward(2)]


@pytest.mark.parametrize(
    ("history", "pending"),
    [
        (ACCUMULATING, 1),
        ([forward(1), backward(2)] * 2, 1),
        ([forward(1), forward(2), backward(3)], 2),
    ],
)
def test_so_do_several_forwards_and_backwards(history: list[ObservedCall], pending: int) -> None:
    watched = SteadyState()
    assert steps(watched, ALIKE + 1, *history)
    assert watched.expected is not None
    assert watched.expected.passed() == []
    for seen in history:
        one = watched.expected.next
        now = one.backward or one.forward
        assert isinstance(now, seen.kind) and (now.site, one.sync) == (seen.site, seen.sync)
        assert one.pending == pending or one.forward
        assert one.following is not None
        watched.expected.next = one.following
        assert watched.expected.passed()[-1] is one
    assert watched.expected.next.optimizer is OPTIMIZER


def test_so_do_optimizers_that_step_together() -> None:
    watched, second = SteadyState(), SimpleNamespace(steps=10**6)
    assert steps(watched, ALIKE + 1, more=[second])
    assert watched.expected is not None
    one, several = watched.expected.first, []
    while one.following is not None:
        one = one.following
        several.append(one.optimizer)
    assert several == [None, OPTIMIZER, second]
    watched.expected.next = one
    assert watched.expected.passed() == [], "the first has made use of all"
    assert not steps(SteadyState(), 1, more=[second])
    alone = SteadyState()
    steps(alone, 100, more=[second])
    alone.observe(forward(1))
    alone.observe(backward(2))
    alone.expected = None
    alone.learn(ACTIVE, OPTIMIZER, 3)
    assert alone.expected is None, "half a step"


@pytest.mark.parametrize(
    "history",
    [
        [forward(1)],
        [forward(1), backward(2), backward(2)],
        [forward(1), None],
        [forward(1), backward(2, of=OTHER)],
        [forward(1, False), backward(2, False)],
        [forward(1), backward(2, False)],
        [forward(1), backward(2), forward(3)],
        [forward(1), backward(2)] * 1000,
        [None] * 1000,
    ],
)
def test_nothing_else_does(history: list[Any]) -> None:
    assert not steps(SteadyState(), 100, *history)


def test_lines_that_take_turns_do_not() -> None:
    watched = SteadyState()
    for number in range(100):
        assert not steps(watched, 1, forward(1), backward(2 + number % 2))


def test_the_first_steps_are_all_looked_at() -> None:
    optimizer = SimpleNamespace(steps=FAST_PATH_AFTER - 1)
    assert not steps(SteadyState(), 100, optimizer=optimizer)


def test_a_program_that_deviates_often_is_looked_at(recorder: Recorder) -> None:
    watched = SteadyState()
    looked = 0
    for _ in range(50):
        while not steps(watched, 1):
            looked += 1
        watched.stage = Stage.FORWARD
        watched.stop(recorder)
    assert looked > 50 * 40


def test_a_pause_costs_no_trust() -> None:
    watched = SteadyState()
    steps(watched, ALIKE + 1)
    watched.pause()
    assert watched.expected is None
    assert steps(watched, 1)


@pytest.mark.parametrize("done", range(3))
def test_who_was_left_out_is_told_what_has_passed(
    done: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[steady_state.PlannedCall]] = []
    interrupted: hooks.Hook[steady_state.Plan] = hooks.Hook("interrupted")
    interrupted.subscribe(lambda recorder, step: told.append(step.passed()))
    monkeypatch.setattr(steady_state, "interrupted", interrupted)
    watched = SteadyState()
    steps(watched, ALIKE + 1)
    expected = watched.expected
    assert expected is not None
    both = [expected.first, expected.first.following]
    for _ in range(done):
        assert expected.next.following is not None
        expected.next = expected.next.following
        watched.stage = Stage.BETWEEN
    watched.stop(recorder)
    assert told == ([both[:done]] if done else [])
    assert watched.expected is None


def test_a_running_backward_goes_on_as_it_began(recorder: Recorder) -> None:
    watched = SteadyState()
    steps(watched, ALIKE + 1)
    watched.stage = Stage.BACKWARD
    watched.stop(recorder)
    assert watched.expected is not None
    watched.stage = Stage.BETWEEN
    watched.settle(recorder)
    assert watched.expected is None


# --- which backwards are examined whole ---------------------------------------------------------


@pytest.mark.parametrize("tensors", [2, 16, 40, 1000])
@pytest.mark.parametrize("asked_every", [1, 7])
def test_the_same_backwards_are_examined_whenever_somebody_asks(
    tensors: int, asked_every: int
) -> None:
    def due(made: int) -> bool:
        shortest = 8 if made < 128 else 32
        window, place = divmod(made, max(shortest, tensors // 2))
        return made < 8 or place == window % max(shortest, tensors // 2)

    parameters = [torch.nn.Parameter(torch.zeros(()))] * tensors
    model = Model(0, torch.nn.Module(), parameters, list(range(tensors)))
    for made in range(0, 3000, asked_every):
        model.synced_backwards = made
        assert model.examined() == model.examined() == due(made), made
        assert model.examined_within(3) == any(map(due, range(made, made + 3))), made
