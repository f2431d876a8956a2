"""Flat tensors of gradients that leave out parameters without one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.events import FlatGradients as Recorded
from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.tensors.flat_layout import PACKED, WHOLE, flat_layout
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

    def reduced(*shape, step=4, op="SUM", tensor=None):
        events = []
        recorder = SimpleNamespace(
            step=step, site=lambda: 7, emit=lambda e, vital: events.append(e)
        )
        passed = torch.zeros(*shape) if tensor is None else tensor
        watcher._called(recorder, Call("all_reduce", 0, False, (passed,), op))
        return events

    reduced.watcher, reduced.model = watcher, model
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


class Sharded(torch.Tensor):
    """As a DTensor, it computes in a way of its own, and cannot be viewed as a flat one."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(func)


def test_gradients_that_are_sharded(recorded):
    head = recorded.model["head"]
    head.weight.grad = torch.Tensor._make_subclass(Sharded, torch.zeros(1, 2))
    (event,) = recorded(3)
    assert event.numel == 3 and not recorded.watcher.layouts


def flat_of(model, begin, numel=11, factor=1.0):
    """A tensor that holds the head's gradients from one element on."""
    flat = torch.zeros(numel)
    gradients = [p.grad.flatten() for p in model["head"].parameters()]
    together = torch.cat(gradients) * factor
    flat[begin : begin + len(together)] = together
    return flat


@pytest.mark.parametrize(("begin", "layout"), [(0, "packed"), (8, "whole"), (3, "")])
@pytest.mark.parametrize("factor", [1, 0.25, -3])
def test_how_a_tensor_as_long_as_the_model_holds_gradients(recorded, begin, layout, factor):
    recorded.model["head"].weight.grad = torch.tensor([[0.5, 0.25]])
    events = recorded(tensor=flat_of(recorded.model, begin, factor=factor))
    assert recorded.watcher.layouts == ({11: layout} if layout else {})
    assert [e.missing for e in events] == (
        [("tower.weight", "tower.bias")] if layout == "packed" else []
    )


def test_gradients_of_which_every_value_is_the_same_tell_nothing():
    assert not flat_layout(torch.ones(4), gradients(None, torch.ones(2)))


def test_the_first_values_may_be_zero():
    last = [torch.zeros(3), torch.tensor([0.0, 2.0, 5.0])]
    flat = torch.tensor([0.0, 0, 0, 0, 2, 5, 0, 0])
    assert flat_layout(flat, gradients(None, *last)) == PACKED
    assert flat_layout(flat.roll(2), gradients(None, *last)) == WHOLE


def test_values_in_another_type():
    torch.manual_seed(0)
    gradient = torch.randn(20)
    flat = torch.cat([gradient, torch.zeros(2)]).bfloat16()
    assert flat_layout(flat, gradients(None, gradient)) == PACKED
    assert not flat_layout(flat, gradients(None, torch.randn(20)))


def gradients(*each):
    """Parameters with these gradients; one without has two elements."""
    return [SimpleNamespace(grad=g, numel=lambda g=g: 2 if g is None else g.numel()) for g in each]
