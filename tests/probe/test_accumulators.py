"""What becomes ready in a backward, and that nothing of the watching stays behind."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import torch
from torch import nn

from ddpdoctor.probe.training.accumulate_grad import Captures, FiringWatch, nodes_of
from ddpdoctor.probe.training.backward_observation import BackwardObservation


def watched(model: nn.Module) -> FiringWatch:
    parameters = list(model.parameters())
    return FiringWatch(parameters, range(len(parameters)))


def test_counts_what_is_accumulated() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["used"].bias.requires_grad_(False)
    watch = watched(model)
    model["used"](torch.ones(1, 2)).sum().backward()
    watch.stop()
    assert watch.counts == {0: 1}


def test_a_gradient_that_is_none_is_ready_for_ddp_too() -> None:
    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, None

    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    watch = watched(model)
    Ignores.apply(model[0], model[1]).sum().backward()
    watch.stop()
    assert model[1].grad is None
    assert watch.counts == {0: 1, 1: 1}
    look = BackwardObservation.__new__(BackwardObservation)
    look.watched, look.firing, look.model = range(2), watch, Mock(find_unused=False)
    assert look.untouched() == ()
    look.model = Mock(find_unused=True)  # DDP leads the backward to what the loss has no part in
    assert look.untouched() == (1,)


def test_gradients_taken_inside_of_a_backward_are_not_accumulated() -> None:
    model = nn.Linear(2, 2)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with torch.enable_grad():
                penalty = model(torch.ones(1, 2)).sum()
            Captures.depth += 1
            torch.autograd.grad(penalty, model.weight)
            Captures.depth -= 1
            return gradient

    x = torch.ones(1, 2, requires_grad=True)
    watch = watched(model)
    Inner.apply(x).sum().backward()
    watch.stop()
    assert watch.counts == {}


def test_hooks_of_the_user_s_stay_and_ours_go() -> None:
    model = nn.Linear(2, 2)
    seen = []
    early = model.weight.register_hook(lambda g: seen.append("early"))
    watch = watched(model)
    late = model.bias.register_hook(lambda g: seen.append("late"))
    model(torch.ones(1, 2)).sum().backward()
    watch.stop()
    model(torch.ones(1, 2)).sum().backward()
    assert watch.counts == {0: 1, 1: 1}
    assert sorted(seen) == ["early", "early", "late", "late"]
    early.remove()
    late.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 4


def test_a_backward_costs_no_more_once_it_was_watched() -> None:
    """What a removed hook on a node leaves costs 2 us per parameter in each backward for ever."""

    def seconds(parameters: list[nn.Parameter]) -> float:
        for parameter in parameters:
            parameter.grad = None
        total = torch.stack(parameters).sum()
        began = time.thread_time()
        total.backward()
        return time.thread_time() - began

    never, once = ([nn.Parameter(torch.ones(())) for _ in range(1000)] for _ in range(2))
    kept = [nodes_of(parameters) for parameters in (never, once)]  # as DDP does
    watch = FiringWatch(once, range(len(once)))
    seconds(once)
    watch.stop()
    assert all(parameter._backward_hooks is None for parameter in once)
    pairs = [(seconds(never), seconds(once)) for _ in range(60)]
    ratio = min(b for _, b in pairs) / min(a for a, _ in pairs)
    assert kept and ratio < 1.12, ratio
