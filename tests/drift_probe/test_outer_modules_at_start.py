"""What modules outside of wrappers are before the first optimizer step."""

import copy

import pytest
import torch
from torch import nn

from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.watchers.gradients import outer_modules
from ddpdoctor.probe.watchers.gradients.outer_modules import _AtStart


@pytest.fixture
def program(monkeypatch):
    """A wrapped model and a copy of it, as the only modules that are known."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    target = copy.deepcopy(model).requires_grad_(False)
    monkeypatch.setattr(ModuleOrigins.current, "outermost", lambda: [model, target])
    monkeypatch.setattr(outer_modules, "_wrapped_modules", lambda: set(map(id, model.modules())))
    return model, target


def test_digests_of_a_copy_are_those_before_it_changes(program):
    _, target = program
    before = _AtStart().digests([*target.parameters()])
    start = _AtStart()
    with torch.no_grad():
        target[0].weight.add_(1)
    assert start.digests([*target.parameters()]) == before
    again = _AtStart().digests([*target.parameters()])
    assert [a == b for a, b in zip(again, before, strict=True)] == [False, True, True, True]


def test_tensors_that_were_not_there(program):
    model, target = program
    start = _AtStart()
    assert start.digests([target[0].weight, target[1].running_mean]) is not None
    assert start.digests([nn.Parameter(torch.ones(2))]) is None
    assert start.digests([*model.parameters()]) is None  # DDP makes them equal
    target[0].weight = nn.Parameter(torch.ones(2, 3))
    assert start.digests([*target.parameters()]) is None
