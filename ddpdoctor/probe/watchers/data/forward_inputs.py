"""Which inputs do the forwards of wrapped models get?

Digests of inputs are recorded at selected forwards, so that ranks can be compared even if they use
no DataLoader.
"""

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
"""Forwards recorded one by one per model. After that every `EVERY`-th, up to `PER_DOUBLING` of
these, then every second of these and so on. All ranks must select the same forwards."""

EVERY, PER_DOUBLING = 8, 16


class _Inputs:
    """What is kept of one model between its forwards.

    Attributes:
        due: the next forward is recorded.
        delivered: batches that loaders had delivered before the last recorded forward.
        positions: of the random generators when the last step or backward ended.
        fed: a loader delivered a batch for the last forward; then generators do not matter.
        own: memory of the last forward's output, to recognise a recurrent state that is fed back.
    """

    def __init__(self) -> None:
        self.due = True
        self.delivered = 0
        self.positions: tuple[Position, ...] | None = None
        self.fed = False
        self.own: set[Any] = set()


_models: defaultdict[Model, _Inputs] = defaultdict(_Inputs)
_ends = Subscriptions()
"""Subscriptions to the moments before a forward that is recorded."""


def install() -> None:
    _models.clear()
    lifecycle.forward_due.subscribe(_forward_due, lost=LOST)
    _ends[:] = (
        lifecycle.backward_ends.subscribe(_backward_ended, lost=LOST),
        lifecycle.step_ends.subscribe(_step_ended, lost=LOST),
        lifecycle.forward_ends.subscribe(_forward_ended, lost=LOST),
    )


def sampled(forward: int) -> bool:
    """Whether the forward of that number is recorded."""
    if forward < FIRST:
        return True
    stride = EVERY << (forward // (EVERY * PER_DOUBLING)).bit_length()
    return forward % stride == 0


def _forward_due(recorder: Recorder, forward: Forward) -> None:
    known = _models[forward.model]
    number = forward.model.forwards - 1
    if sampled(number):
        _record(recorder, forward, known, number)
    known.due = sampled(number + 1)
    due = any(one.due for one in _models.values())
    _ends.enable(due)


def _record(recorder: Recorder, forward: Forward, known: _Inputs, number: int) -> None:
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
        _keep_positions(model)


def _step_ended(recorder: Recorder, step: Step) -> None:
    for model in list(_models):
        _keep_positions(model)


def _keep_positions(model: Model) -> None:
    """Keep the positions of the generators after a step or backward, if the next forward is
    recorded and no loader feeds it."""
    known = _models.get(model)
    if known is not None and known.due and not known.fed:
        known.positions = rng_state.positions()
