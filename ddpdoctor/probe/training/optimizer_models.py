"""Which wrapped models an optimizer trains: sets `Step.holdings` before each step."""

from __future__ import annotations

from typing import Any

from ..recording.recorder import Recorder
from ..recording.watcher import Watcher, on
from . import lifecycle
from .optimizers import Optimizers
from .records import OptimizerModel, Step
from .tracked_model import Model
from .wrapped_models import WrappedModels


class _Known:
    """What is known of one optimizer.

    Attributes:
        holdings: the models that it trains.
        size, models: how many parameters it had, and how many models there were, at that time.
    """

    def __init__(self) -> None:
        self.holdings: list[OptimizerModel] = []
        self.size = -1
        self.models = -1


class OptimizerModels(Watcher):
    lost = "which models an optimizer trains, and with it drift and unsynchronised steps"

    def install(self) -> None:
        """Must be called before the watchers that read `Step.holdings` subscribe."""

    @on(lifecycle.step_begins, fast_path=False)
    @on(lifecycle.fast_step_due)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        known = step.known.notes.get(_Known)
        if known is None:
            known = step.known.notes[_Known] = _Known()
        count = WrappedModels.current.count()
        # Parameters may be added to an optimizer at any time, but rarely are: looked at when
        # sampled.
        if step.due or known.models != count:
            optimizer = step.optimizer()
            groups = () if optimizer is None else optimizer.param_groups
            size = sum(len(group["params"]) for group in groups)
            if (size, count) != (known.size, known.models):
                known.size, known.models = size, count
                known.holdings = _find(optimizer, step.known.number)
        step.holdings = known.holdings


def steps_taken(holding: OptimizerModel) -> int:
    """How many steps the optimizer has taken; -1 if it is gone."""
    return next((k.steps for k in Optimizers.current.known() if k.number == holding.optimizer), -1)


def steps_of(model: Model) -> int:
    """How many steps the optimizer of a model has taken (the most, if it has several); 0 if none is
    known."""
    notes = ((known.steps, known.notes.get(_Known)) for known in Optimizers.current.known())
    mine = [n for n, k in notes if k is not None and any(h.model is model for h in k.holdings)]
    return max(mine, default=0)


def _find(optimizer: Any, number: int) -> list[OptimizerModel]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    claimed = {
        h.model
        for other in Optimizers.current.known()
        if other.number != number and _Known in other.notes
        for h in other.notes[_Known].holdings
    }
    found = []
    for model in WrappedModels.current.live():
        there = model.held()
        mine = {i for i, p in there.items() if id(p) in held}
        if not mine:
            continue
        if model not in claimed:
            mine |= {i for i, p in there.items() if not p.requires_grad}
        found.append(OptimizerModel(model, number, sorted(mine)))
    return found
