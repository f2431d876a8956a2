"""Which wrapped models' parameters an optimizer holds."""

from __future__ import annotations

import weakref
from typing import Any

from . import models
from .models import Model
from .moments import Step


class Holding:
    """The parameters of one model that one optimizer steps. Keeps nothing alive.

    Attributes:
        positions: in `Wrapped.parameters`, ascending. The first optimizer of a model also answers
            for its frozen parameters: they are replicated too.
        synchronised: those of `positions` whose gradients DDP averages.
    """

    def __init__(self, model: Model, optimizer: int, positions: list[int]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.positions = positions
        expected = set(model.expected)
        self.synchronised = [p for p in positions if p in expected]

    def parameters(self, positions: list[int]) -> list[Any]:
        """The parameters at positions, None for those that are gone."""
        return [self.model.parameters[p]() for p in positions]


class _Known:
    def __init__(self) -> None:
        self.holdings: list[Holding] = []
        self.size = -1
        self.models = -1


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def forget() -> None:
    _known.clear()


def of(step: Step) -> list[Holding]:
    """The wrapped models that a stepping optimizer trains."""
    if step.holdings is None:
        step.holdings = _of(step)
    return step.holdings


def _of(step: Step) -> list[Holding]:
    optimizer = step.optimizer()
    if optimizer is None:
        return []
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = _Known()
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    count = models.count()
    if (size, count) != (known.size, known.models):
        known.size, known.models = size, count
        known.holdings = _find(optimizer, step.known.number)
    return known.holdings


def _find(optimizer: Any, number: int) -> list[Holding]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    claimed = {
        h.model for other, known in _known.items() if other is not optimizer for h in known.holdings
    }
    found = []
    for model in models.live():
        parameters = [ref() for ref in model.parameters]
        mine = [i for i, p in enumerate(parameters) if p is not None and id(p) in held]
        if not mine:
            continue
        if model not in claimed:
            mine += [
                i
                for i, p in enumerate(parameters)
                if p is not None and not p.requires_grad and i not in model.ignored
            ]
        found.append(Holding(model, number, sorted(set(mine) - model.ignored)))
    return found
