"""What is recorded of the state of a sharded optimizer after it was loaded."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.events import ShardStates as Recorded
from ddpdoctor.events.pack import unpack
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.watchers.gradients import shard_states
from ddpdoctor.probe.watchers.gradients.shard_states import ShardStates


@pytest.fixture
def training(monkeypatch):
    """A model whose weight is taken for a shard, its optimizer, and what is recorded of a step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4.0).unsqueeze(0)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(ModuleOrigins.current, "outermost", lambda: [model])
    monkeypatch.setattr(shard_states, "_is_sharded", lambda p: p is model.weight)
    watcher = ShardStates()

    def step():
        events = []
        recorder = SimpleNamespace(emit=lambda e, vital: events.append(e))
        known = SimpleNamespace(number=0)
        at = SimpleNamespace(known=known, number=3, optimizer=weakref.ref(optimizer))
        watcher._step_begins(recorder, at)
        return events

    return watcher, optimizer, step


def load(watcher, optimizer, error=None):
    watcher._loaded(SimpleNamespace(), (optimizer, 7), None, error)


def test_the_first_step_after_a_load(training):
    watcher, optimizer, step = training
    assert not step()
    load(watcher, optimizer)
    (event,) = step()
    assert isinstance(event, Recorded)
    assert (event.step, event.site, event.names) == (3, 7, ("weight",))
    (value,), (state,) = unpack(event.values), unpack(event.states)
    assert value and state and value != state
    assert not step(), "each load once"


def test_states_that_are_not_there(training):
    watcher, optimizer, step = training
    load(watcher, optimizer, RuntimeError("refused"))
    assert not step()
    for number in (0.0, 0.1):
        for state in optimizer.state.values():
            state["exp_avg"].fill_(number)
        load(watcher, optimizer)
        assert not step(), "the same for every shard"
    optimizer.state.clear()
    load(watcher, optimizer)
    assert not step()
