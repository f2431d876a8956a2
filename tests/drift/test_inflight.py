"""Which gradients are applied while their exchange runs: those that nobody waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe import autograd, exchanges, inflight
from ddpdoctor.probe.exchanges import Exchange
from ddpdoctor.probe.moments import Issued
from ddpdoctor.ring import State

GRADIENTS = [torch.ones(100), torch.ones(10)]
OWN = Exchange(0, 100, GRADIENTS[0].untyped_storage().data_ptr())
FLAT = Exchange(0, 110, 1)
LOSS = Exchange(0, 1, 2)


class Work:
    def __init__(self, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    inflight._flights.__init__()  # type: ignore[misc]
    monkeypatch.setattr(autograd, "since", lambda step: True)


def steps(
    monkeypatch: pytest.MonkeyPatch,
    carries: Exchange,
    *,
    done: bool = False,
    waited: bool = False,
    step: int = 0,
) -> int:
    """Of how many steps it is told, after one."""
    state = State.DONE if waited else State.RETURNED
    ring = SimpleNamespace(state=lambda number: state)
    active: Any = SimpleNamespace(step=step, site=lambda: 3)
    monkeypatch.setattr(exchanges, "latest", lambda: (carries,))
    monkeypatch.setattr(inflight, "tape", lambda active: SimpleNamespace(ring=ring))
    inflight._issued(active, Issued(7, (Work(done),)))
    inflight.step_begins(GRADIENTS)
    step_of: Any = SimpleNamespace(known=SimpleNamespace(number=1))
    inflight._step_ends(active, step_of)
    assert not inflight._flights.issued and not inflight._flights.running, "nothing is kept"
    assert inflight.steps(0) == (0, -1), "another optimizer"
    return inflight.steps(1)[0]


@pytest.mark.parametrize("carries", [OWN, FLAT])
def test_an_exchange_that_runs_on(monkeypatch: pytest.MonkeyPatch, carries: Exchange) -> None:
    assert steps(monkeypatch, carries) == 1
    assert inflight.steps(1) == (1, 3)


def test_what_is_logged_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, LOSS) == 0


def test_an_exchange_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, done=True) == 0


def test_a_step_that_waits_for_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, waited=True) == 0


def test_later_steps_keep_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, step=inflight.STEPS) == 0
