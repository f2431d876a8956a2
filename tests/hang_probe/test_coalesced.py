"""Calls inside of torch's `_coalescing_manager` are issued, and waited for, at its exit. They
return a placeholder in place of their work, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _IllegalWork

from ddpdoctor.probe.collectives import coalescing, collectives
from ddpdoctor.probe.collectives.coalescing import Coalesced
from ddpdoctor.probe.recording import patching
from ddpdoctor.storage.call_ring import State


class Work:
    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("work", [_IllegalWork(), Work()], ids=["placeholder", "work"])
def test_a_placeholder_is_no_work(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """It has all attributes, and none can be called."""
    issued: list[Any] = []
    marks: list[State] = []
    ring = SimpleNamespace(mark=lambda number, state: marks.append(state))
    log = SimpleNamespace(issued=lambda number, works: issued.extend(works), ring=ring)
    monkeypatch.setattr(collectives, "call_log_of", lambda recorder: log)
    recorder = SimpleNamespace(trouble=lambda part, error, lost="": pytest.fail(str(error)))
    monkeypatch.setattr(collectives, "current_recorder", lambda: recorder)
    monkeypatch.setattr(collectives.call_hooks.issued, "fire", lambda *args: None)
    collectives._returned(3, work)
    assert (issued, marks) == (([work], []) if isinstance(work, Work) else ([], [State.DONE]))


class Ring:
    """The states of calls of the default group."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def call(self, number: int) -> tuple[int, int]:
        return 0, number

    def mark(self, number: int, state: State) -> None:
        self.states[number] = state


class Manager:
    """Stands for torch's: its exit issues all calls; `seen` is what the ring says meanwhile."""

    def __init__(self, ring: Ring, works: list[Any]) -> None:
        self.ring, self.works = ring, works
        self.seen: dict[int, State] = {}

    def __enter__(self) -> Any:
        return SimpleNamespace(works=self.works)

    def __exit__(self, *error: Any) -> None:
        self.seen = dict(self.ring.states)
        if self.works == ["broken"]:
            raise RuntimeError("the other rank is gone")


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    made = Ring()
    issued: dict[Any, int] = {}

    def issue(number: int, works: tuple[Any, ...]) -> None:
        made.mark(number, State.RETURNED)
        issued.update(dict.fromkeys(works, number))

    log = SimpleNamespace(ring=made, issued=issue, works=issued)
    recorder = SimpleNamespace(trouble=lambda part, error, lost="": pytest.fail(str(error)))
    for module in (collectives, coalescing):
        monkeypatch.setattr(module, "call_log_of", lambda recorder: log)
        monkeypatch.setattr(module, "current_recorder", lambda: recorder)
    for hook in ("issued", "waited", "call_failed"):
        monkeypatch.setattr(getattr(collectives.call_hooks, hook), "fire", lambda *args: None)
    return made


@pytest.mark.parametrize("works", [[], [Work()]], ids=["sync", "async"])
def test_the_exit_is_the_call(ring: Ring, works: list[Any]) -> None:
    """The last call stands for all of them: the rank waits in it."""
    manager = Manager(ring, works)
    with Coalesced(manager, 0):
        for number in (3, 4, 5):
            collectives._returned(number, _IllegalWork() if works else None)
        assert set(ring.states.values()) == {State.RETURNED}
    assert manager.seen == {3: State.RETURNED, 4: State.RETURNED, 5: State.WAITING}
    last = State.RETURNED if works else State.DONE
    assert ring.states == {3: State.DONE, 4: State.DONE, 5: last}
    collectives._returned(6, None)
    assert ring.states[6] is State.DONE, "it is over"


def test_calls_of_other_groups_are_none_of_it(ring: Ring) -> None:
    with Coalesced(Manager(ring, []), 1):
        collectives._returned(3, None)
    assert ring.states == {3: State.DONE}


def test_an_exit_that_raises_failed(ring: Ring) -> None:
    with pytest.raises(RuntimeError, match="gone"), Coalesced(Manager(ring, ["broken"]), 0):
        collectives._returned(3, None)
    assert ring.states == {3: State.FAILED}


def test_what_batches_messages_is_a_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`batch_isend_irecv` uses the manager on some backends."""
    inside = [True]
    monkeypatch.setattr(coalescing, "current_recorder", lambda: pytest.fail("it is asked"))
    original = c10d._coalescing_manager
    coalescing.watch(lambda: inside[0])
    try:
        assert c10d._coalescing_manager is not original
        assert not isinstance(c10d._coalescing_manager(object()), Coalesced)
    finally:
        patching.restore()
    assert c10d._coalescing_manager is original
