"""Which gradients are applied while their exchange runs: those that nobody waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.collectives.call_hooks import Issued
from ddpdoctor.probe.training import backwards
from ddpdoctor.probe.watchers.manual_sync import exchanges, pending_works
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchange
from ddpdoctor.storage.call_ring import State

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
    pending_works._pending.__init__()  # type: ignore[misc]
    monkeypatch.setattr(backwards, "since", lambda step: True)


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
    recorder: Any = SimpleNamespace(step=step, site=lambda: 3)
    monkeypatch.setattr(exchanges, "latest_exchanges", lambda: (carries,))
    monkeypatch.setattr(pending_works, "call_log_of", lambda recorder: SimpleNamespace(ring=ring))
    pending_works._issued(recorder, Issued(7, (Work(done),)))
    pending_works.step_begins(GRADIENTS)
    step_of: Any = SimpleNamespace(known=SimpleNamespace(number=1))
    pending_works._step_ends(recorder, step_of)
    assert not pending_works._pending.issued and not pending_works._pending.running, (
        "nothing is kept"
    )
    assert pending_works.steps(0) == (0, -1), "another optimizer"
    return pending_works.steps(1)[0]


@pytest.mark.parametrize("carries", [OWN, FLAT])
def test_an_exchange_that_runs_on(monkeypatch: pytest.MonkeyPatch, carries: Exchange) -> None:
    assert steps(monkeypatch, carries) == 1
    assert pending_works.steps(1) == (1, 3)


def test_what_is_logged_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, LOSS) == 0


def test_an_exchange_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, done=True) == 0


def test_a_step_that_waits_for_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, waited=True) == 0


def test_later_steps_keep_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, step=pending_works.STEPS) == 0
