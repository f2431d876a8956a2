"""The collectives of DTensors, as the probe logs them."""

from types import SimpleNamespace

import pytest
import torch

from ddpdoctor.probe.collectives import functional
from ddpdoctor.probe.collectives.collectives import Collectives
from ddpdoctor.probe.collectives.functional import FunctionalCollectives
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.storage.call_ring import State

PLACES = {"self": 0, "reduceOp": 1, "group": 2, "tag": 3}


@pytest.fixture
def watched(monkeypatch):
    """A watcher, and what it logs: the calls, and the states they get."""
    calls, states = [], []
    log = SimpleNamespace(
        here=lambda: 7, collective=lambda *given: calls.append(given[:3]) or len(calls)
    )
    monkeypatch.setattr(functional, "call_log_of", lambda _: log)
    monkeypatch.setattr(functional, "mark", lambda *given: states.append(given))
    monkeypatch.setattr(functional.call_hooks.waited, "fire", lambda *_: None)
    monkeypatch.setattr(ProcessGroups.current, "exist", lambda: True)
    monkeypatch.setattr(ProcessGroups.current, "number_of", lambda group: group)
    monkeypatch.setattr(Collectives.current, "inside", False)
    return FunctionalCollectives(), calls, states


def begin(watcher, group=3):
    args = (torch.ones(2), "sum", group)
    return watcher._called("all_reduce", PLACES, lambda g, _: g, None, args, {})


def test_a_result_that_is_waited_for_later(watched):
    watcher, calls, states = watched
    number = begin(watcher)
    assert calls == [(3, "all_reduce", 7)]
    assert begin(watcher) is None, "within the call"
    later = SimpleNamespace(elem=torch.ones(2))
    watcher._returned(None, number, later, None)
    token = watcher._waits(None, (later,), {})
    watcher._waited(None, token, None, None)
    assert states == [(1, State.RETURNED), (1, State.WAITING), (1, State.DONE)]
    assert watcher._waits(None, (SimpleNamespace(elem=torch.ones(2)),), {}) is None


def test_a_result_that_is_there_and_one_that_never_comes(watched):
    watcher, _, states = watched
    watcher._returned(None, begin(watcher), torch.ones(2), None)
    watcher._returned(None, begin(watcher), None, RuntimeError("connection closed"))
    assert states == [(1, State.DONE), (2, State.FAILED)]


def test_nothing_is_logged_while_torch_traces_or_outside_of_the_group(watched):
    watcher, calls, _ = watched
    assert begin(watcher, group=-1) is None
    watcher.tracing = lambda: True
    assert begin(watcher) is None
    assert calls == []
