"""What the forwards of wrapped models are given, so that ranks can be compared without a loader."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from ....events import ForwardInput
from ...recording import rng_state
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.rng_state import Position
from ...tensors.sample_digests import begins, content, memories, samples
from ...training import lifecycle
from ...training.records import Backward, Forward, Step
from ...training.tracked_model import Model
from . import loaders
from .iteration import delivered_by

LOST = "what the models were given"

FIRST = 16
"""Forwards recorded one by one, per model; then every `EVERY`-th up to `PER_DOUBLING` of them, then
every second of these and so on: the same ones on every rank."""

EVERY, PER_DOUBLING = 8, 16


class _Model:
    """What is known of one model's inputs.

    Attributes:
        due: the next forward is looked at.
        positions: of the generators when the last step or backward ended.
        fed: a loader delivered before the last forward, so that nobody needs the generators.
        own: memory that the last forward's output lies in: a recurrent state comes back detached.
    """

    def __init__(self) -> None:
        self.due = True
        self.delivered = 0
        self.positions: tuple[Position, ...] | None = None
        self.fed = False
        self.own: set[Any] = set()


_models: defaultdict[Model, _Model] = defaultdict(_Model)
_ends = Subscriptions()
"""Of what comes before a forward that is looked at."""


def install() -> None:
    _models.clear()
    lifecycle.forward_due.subscribe(_forward_due, lost=LOST)
    _ends[:] = (
        lifecycle.backward_ends.subscribe(_backward_ended, lost=LOST),
        lifecycle.step_ends.subscribe(_step_ended, lost=LOST),
        lifecycle.forward_ends.subscribe(_forward_ended, lost=LOST),
    )


def sampled(forward: int) -> bool:
    """Whether this forward of a model is looked at."""
    if forward < FIRST:
        return True
    stride = EVERY << (forward // (EVERY * PER_DOUBLING)).bit_length()
    return forward % stride == 0


def _forward_due(recorder: Recorder, forward: Forward) -> None:
    known = _models[forward.model]
    number = forward.model.forwards - 1
    if sampled(number):
        _look(recorder, forward, known, number)
    known.due = sampled(number + 1)
    due = any(one.due for one in _models.values())
    _ends.enable(due)


def _look(recorder: Recorder, forward: Forward, known: _Model, number: int) -> None:
    inputs = (*forward.args, *forward.kwargs.values())
    batches, found = loaders.delivered(), delivered_by(memories(inputs))
    known.fed, known.delivered = batches > known.delivered or bool(found), batches
    own = known.own & memories(inputs) if known.own else known.own
    digested, numbers = content(inputs, own)
    before, known.positions = known.positions, None
    recorder.emit(
        ForwardInput(
            at=time.monotonic(),
            model=forward.model.number,
            forward=number,
            site=forward.site,
            digest=digested,
            numbers=numbers,
            rows=samples(inputs),
            begins=begins(inputs),
            carried=bool(own),
            fed=known.fed,
            drawn=rng_state.drawn(before, rng_state.positions()) if before else -1,
            training=bool(getattr(forward.wrapper, "training", True)),
            loaders=found,
        )
    )


def _forward_ended(recorder: Recorder, forward: Forward) -> None:
    known = _models.get(forward.model)
    if known is not None and known.due and forward.grad_enabled:
        given = memories((*forward.args, *forward.kwargs.values()))
        known.own = memories(forward.output) - given


def _backward_ended(recorder: Recorder, backward: Backward) -> None:
    for model in backward.models:
        _note(model)


def _step_ended(recorder: Recorder, step: Step) -> None:
    for model in list(_models):
        _note(model)


def _note(model: Model) -> None:
    """Remember where things stand now that a step is over, if the next forward is looked at."""
    known = _models.get(model)
    if known is not None and known.due and not known.fed:
        known.positions = rng_state.positions()
