"""Which inputs do the forwards of wrapped models get?

Digests of inputs are recorded at selected forwards, so that ranks can be compared even if they use
no DataLoader.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

from ....events import ForwardInput
from ...recording import rng_state
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.rng_state import Position
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...tensors.sample_digests import begins, content, latest_batch, memories, samples
from ...training import lifecycle
from ...training.records import Backward, Forward, Step
from ...training.tracked_model import Model
from .iteration import delivered_by
from .loaders import Loaders

FIRST = 16
"""Forwards recorded one by one per model. After that every `EVERY`-th, up to `PER_DOUBLING` of
these, then every second of these and so on. All ranks must select the same forwards."""

EVERY, PER_DOUBLING = 8, 16


class _Inputs:
    """What is kept of one model between its forwards.

    Attributes:
        due: the next forward is recorded.
        delivered: batches that loaders had delivered before the last recorded forward.
        positions: of the random generators when the last step or backward ended; `begun` when the
            last recorded forward began, `inside` what was drawn in it and its backward.
        fed: a loader delivered a batch for the last forward; then generators do not matter.
        own: memory of the last forward's output, to recognise a recurrent state that is fed back.
    """

    def __init__(self) -> None:
        self.due = True
        self.delivered = 0
        self.positions: tuple[Position, ...] | None = None
        self.begun: tuple[Position, ...] | None = None
        self.inside = -1
        self.fed = False
        self.own: set[Any] = set()


FIRST_SHARDED = -2
"""The number of the first model that is sharded, not wrapped; the next ones are below it."""


class Sharded:
    """A module of `fully_shard`, whose inputs these ranks ought to divide among them."""

    def __init__(self, number: int, kind: str, ranks: tuple[int, ...]) -> None:
        self.number = number
        self.kind = kind
        self.ranks = ranks
        self.forwards = 0


class ForwardInputs(Watcher):
    lost = "what the models were given"

    """
    Attributes:
        sharded: modules of `fully_shard` that were called from outside of any other.
    """

    def __init__(self) -> None:
        self._models: defaultdict[Model | Sharded, _Inputs] = defaultdict(_Inputs)
        self.sharded: WeakIdentityMap[Sharded] = WeakIdentityMap()
        # Subscriptions to the moments before a forward that is recorded.
        self._ends = Subscriptions()

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        known = self._models[forward.model]
        number = forward.model.forwards - 1
        if sampled(number):
            training = bool(getattr(forward.wrapper, "training", True))
            given = _Given(forward.args, forward.kwargs, forward.site, training)
            _record(recorder, forward.model, given, known, number)
        known.due = sampled(number + 1)
        due = any(one.due for one in self._models.values())
        self._ends.enable(due)

    @on(lifecycle.forward_ends, during="_ends", enabled=True)
    def _forward_ended(self, recorder: Recorder, forward: Forward) -> None:
        known = self._models.get(forward.model)
        if known is not None and known.due and forward.grad_enabled:
            given = memories((*forward.args, *forward.kwargs.values()))
            known.own = memories(forward.output) - given

    @on(lifecycle.backward_ends, during="_ends", enabled=True)
    def _backward_ended(self, recorder: Recorder, backward: Backward) -> None:
        for model in backward.models:
            self._keep_positions(model)

    @on(lifecycle.step_ends, during="_ends", enabled=True)
    def _step_ended(self, recorder: Recorder, step: Step) -> None:
        for model in list(self._models):
            self._keep_positions(model)

    def sharded_forward(
        self, recorder: Recorder, module: Any, args: Args, kwargs: Kwargs, ranks: tuple[int, ...]
    ) -> None:
        """A forward of a module that `fully_shard` shards over these ranks, or replicates over some
        of them, begins."""
        import torch

        if not torch.is_grad_enabled():
            return
        model = self.sharded.get(module)
        if model is None:
            number = FIRST_SHARDED - len(self.sharded)
            model = Sharded(number, type(module).__name__.removeprefix("FSDP"), ranks)
            self.sharded[module] = model
        known, number = self._models[model], model.forwards
        model.forwards += 1
        if sampled(number):
            given = _Given(args, kwargs, recorder.site(), bool(module.training))
            _record(recorder, model, given, known, number)
        known.due = sampled(number + 1)
        if known.due:
            self._ends.enable()

    def _keep_positions(self, model: Model | Sharded) -> None:
        """Keep the positions of the generators after a step or backward, if the next forward is
        recorded and no loader feeds it."""
        known = self._models.get(model)
        if known is not None and known.due and not known.fed:
            known.positions = rng_state.positions()
            if known.begun is not None:
                known.inside = rng_state.drawn(known.begun, known.positions)
                known.begun = None


def sampled(forward: int) -> bool:
    """Whether the forward of that number is recorded."""
    if forward < FIRST:
        return True
    stride = EVERY << (forward // (EVERY * PER_DOUBLING)).bit_length()
    return forward % stride == 0


class _Given(NamedTuple):
    """What a forward is given, and where."""

    args: Args
    kwargs: Kwargs
    site: int
    training: bool


def _record(
    recorder: Recorder, model: Model | Sharded, given: _Given, known: _Inputs, number: int
) -> None:
    inputs = (*given.args, *given.kwargs.values())
    batches, found = Loaders.current.delivered, delivered_by(memories(inputs))
    known.fed, known.delivered = batches > known.delivered or bool(found), batches
    own = known.own & memories(inputs) if known.own else known.own
    found_in = content(inputs, own)
    before, known.positions = known.positions, None
    now = None if known.fed else rng_state.positions()
    known.begun, inside, known.inside = now, known.inside, -1
    recorder.emit(
        ForwardInput(
            at=time.monotonic(),
            model=model.number,
            forward=number,
            site=given.site,
            digest=found_in.digest,
            numbers=found_in.numbers,
            parts=found_in.parts if len(found_in.parts) > 1 else (),
            sizes=found_in.sizes if len(found_in.parts) > 1 else (),
            rows=samples(inputs),
            begins=begins(inputs),
            carried=bool(own),
            fed=known.fed,
            drawn=rng_state.drawn(before, now) if before and now else -1,
            training=given.training,
            states=rng_state.digests(now) if now else (),
            loaders=found,
            batch=latest_batch.numbers,
            kind=model.kind if isinstance(model, Sharded) else "",
            ranks=model.ranks if isinstance(model, Sharded) else (),
            step=recorder.step,
            inside=inside,
        )
    )
