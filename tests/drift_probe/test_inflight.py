"""Which gradients are applied while their exchange runs: those that nobody waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.probe.collectives.call_hooks import Issued
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.watchers.manual_sync import limits, pending_works
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchange, Exchanges
from ddpdoctor.probe.watchers.manual_sync.pending_works import PendingWorks
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
    PendingWorks.renew()
    monkeypatch.setattr(Backwards.current, "since", lambda step: True)


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
    monkeypatch.setattr(Exchanges.current, "latest_exchanges", lambda: (carries,))
    monkeypatch.setattr(pending_works, "call_log_of", lambda recorder: SimpleNamespace(ring=ring))
    PendingWorks.current._issued(recorder, Issued(7, (Work(done),)))
    PendingWorks.current.step_begins(GRADIENTS)
    step_of: Any = SimpleNamespace(known=SimpleNamespace(number=1))
    PendingWorks.current._step_ends(recorder, step_of)
    assert not PendingWorks.current.issued and not PendingWorks.current.running, "nothing is kept"
    assert PendingWorks.current.steps(0) == (0, -1), "another optimizer"
    return PendingWorks.current.steps(1)[0]


@pytest.mark.parametrize("carries", [OWN, FLAT])
def test_an_exchange_that_runs_on(monkeypatch: pytest.MonkeyPatch, carries: Exchange) -> None:
    assert steps(monkeypatch, carries) == 1
    assert PendingWorks.current.steps(1) == (1, 3)


def test_what_is_logged_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, LOSS) == 0


def test_an_exchange_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, done=True) == 0


def test_a_step_that_waits_for_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, waited=True) == 0


def test_later_steps_keep_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, OWN, step=limits.WORK_STEPS) == 0
