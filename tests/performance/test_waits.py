"""Which part of a step the time between two moments is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.events.timing import PHASES
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.timing import idle_time
from ddpdoctor.probe.watchers.timing.idle_time import IdleTime
from ddpdoctor.storage.call_ring import Phase

TRAINED, EVALUATED = 1, 2
"""Lines that load."""

TRAINING = [f"load {TRAINED}", "loaded", "forward", "out", "backward", "through"]
EVALUATION = [f"load {EVALUATED}", "loaded"]
TRIAL = ["trial", "tried"]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = SimpleNamespace(training=True)
    monkeypatch.setattr(
        WrappedModels.current, "live", lambda: [SimpleNamespace(inner=lambda: module)]
    )
    IdleTime.renew()
    yield module
    IdleTime.renew()


def spent(monkeypatch: pytest.MonkeyPatch, moments: list[str]) -> dict[str, int]:
    """Seconds by segment, of a step in which each moment comes a second after the one before;
    those in capitals without gradients."""
    recorder: Any = None
    now = 0
    monkeypatch.setattr(idle_time, "time", SimpleNamespace(monotonic=lambda: now))
    IdleTime.current.begin_step(now)
    backward, step = (
        IdleTime.current._phase_begins(Phase.BACKWARD),
        IdleTime.current._phase_begins(Phase.OPTIMIZER),
    )
    for now, moment in enumerate([*moments, "step", "done"], 1):
        name, _, site = moment.lower().partition(" ")
        of = SimpleNamespace(site=int(site or 9), grad_enabled=name not in TRIAL)
        with torch.set_grad_enabled(moment.islower()):
            if name == "load":
                IdleTime.current._loading_begins(recorder, of)
            elif name in ("forward", "trial"):
                IdleTime.current._forward_begins(recorder, of)
            elif name in ("out", "tried"):
                IdleTime.current._forward_ends(recorder, of)
            elif name == "backward":
                backward(recorder, of)
            elif name == "step":
                step(recorder, of)
            elif name == "done":
                IdleTime.current.add_elapsed(now)
            else:
                IdleTime.current._phase_ends(recorder, of)
    names = [*PHASES, *(f"after {phase}" for phase in PHASES)]
    return {n: int(s) for n, s in zip(names, IdleTime.current.spent, strict=True) if s}


USUAL = {
    "after optimizer": 1, "data": 1, "after data": 1, "forward": 1, "after forward": 1,
    "backward": 1, "after backward": 1, "optimizer": 1,
}  # fmt: skip


def test_a_usual_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spent(monkeypatch, TRAINING) == USUAL


def test_validation_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [m.upper() for m in EVALUATION]
    found = spent(monkeypatch, [*without * 3, *TRAINING])
    assert found == {**USUAL, "after optimizer": 7}
    assert IdleTime.current.sites[0] == TRAINED


def test_validation_whose_forwards_alone_are_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = spent(monkeypatch, [*[*EVALUATION, *TRIAL] * 2, *TRAINING])
    assert found == {**USUAL, "after optimizer": 9}
    assert IdleTime.current.sites[0] == TRAINED


def test_validation_of_the_bare_model(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    model.training = False
    IdleTime.current.begin_step(0)
    IdleTime.current._loading_begins(None, SimpleNamespace(site=EVALUATED))  # type: ignore[arg-type]
    assert IdleTime.current.tried


def test_validation_between_a_batch_and_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [m.upper() for m in EVALUATION]
    found = spent(monkeypatch, [*TRAINING[:2], *without * 2, *TRAINING[2:]])
    assert found == {**USUAL, "after data": 5}
    assert IdleTime.current.sites[0] == TRAINED


def test_batches_that_are_all_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    several = spent(monkeypatch, [*TRAINING[:2] * 3, *TRAINING[2:]])
    assert several == {**USUAL, "data": 3, "after data": 3}


def test_forwards_without_gradients_before_the_one_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A teacher's, or a generator's: the batch is trained on all the same."""
    assert spent(monkeypatch, [*TRAINING[:2], *TRIAL, *TRAINING[2:]]) == {**USUAL, "after data": 3}


def test_training_batches_loaded_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spent(monkeypatch, [f"LOAD {TRAINED}", "LOADED", *TRAINING[2:]]) == USUAL
