"""Flat tensors of gradients that leave out parameters without one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.events import FlatGradients as Recorded
from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.manual_sync.flat_gradients import FlatGradients


@pytest.fixture
def recorded(monkeypatch):
    """What is recorded of reducing a tensor of so many elements; the tower has no gradient."""
    model = nn.ModuleDict({"tower": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    model["head"](torch.ones(1, 2)).backward()
    held = {id(p): p for p in model.parameters()}
    monkeypatch.setattr(Optimizers.current, "parameters", lambda: held)
    monkeypatch.setattr(ModuleOrigins.current, "outermost", lambda: [model])
    monkeypatch.setattr(Backwards.current, "since", lambda step: step == 4)
    watcher = FlatGradients()

    def reduced(*shape, step=4, op="SUM"):
        events = []
        recorder = SimpleNamespace(
            step=step, site=lambda: 7, emit=lambda e, vital: events.append(e)
        )
        watcher._called(recorder, Call("all_reduce", 0, False, (torch.zeros(*shape),), op))
        return events

    return reduced


def test_the_parameters_without_a_gradient(recorded):
    (event,) = recorded(3)
    assert isinstance(event, Recorded)
    assert (event.numel, event.whole, event.step, event.site) == (3, 11, 4, 7)
    assert event.missing == ("tower.weight", "tower.bias")
    assert not recorded(3), "each size once"


def test_tensors_that_hold_something_else(recorded):
    assert not recorded(5)
    assert not recorded(3, 1)
    assert not recorded(3, op=None)
    assert not recorded(3, step=5), "no backward before it"
    assert recorded(3)
