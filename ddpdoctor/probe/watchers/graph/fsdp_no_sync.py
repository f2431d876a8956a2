"""Whether `fully_shard` ever reduces the gradients that an optimizer is to apply: switched off
(`set_requires_gradient_sync`), it keeps them whole, where no optimizer finds them."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ....events import KeptBack
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import fully_shards, kept_back, shards
from ...training import lifecycle, optimizers
from ...training.module_origins import living
from ...training.records import Step

LOST = "whether `fully_shard` reduces gradients"

_following = Subscriptions()
"""Of every step, while there is an optimizer that has not applied any."""


class Waiting:
    """What is known of an optimizer that has not applied a sharded gradient yet.

    Attributes:
        shards: torch's records of its parameters.
        told: a step found none, though a backward had made some.
    """

    def __init__(self, shards: list[Any]) -> None:
        self.shards = [weakref.ref(shard) for shard in shards]
        self.emitted = False


def install() -> None:
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _following[:] = (lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),)


def _step_due(recorder: Recorder, step: Step) -> None:
    optimizer = step.optimizer()
    if step.number or optimizer is None or not fully_shards():
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    every = [s for module in living() for s in shards(module) if id(s.sharded_param) in held]
    if every:
        step.known.notes[Waiting] = Waiting(every)
        _following.enable()
        _step_begins(recorder, step)


def _step_begins(recorder: Recorder, step: Step) -> None:
    waiting = step.known.notes.get(Waiting)
    if waiting is None:
        return
    every = [shard for ref in waiting.shards if (shard := ref()) is not None]
    given = [shard for shard in every if shard.sharded_param.grad is not None]
    # Some are zeros that torch itself makes, to have the optimizer make its state.
    applied = not all(map(kept_back, given))
    if applied:
        del step.known.notes[Waiting]
        _following.enable(any(Waiting in known.notes for known in optimizers.known()))
    kept = not given and not waiting.emitted and any(map(kept_back, every))
    if kept or (applied and waiting.emitted):
        waiting.emitted = True
        recorder.emit(
            KeptBack(
                at=time.monotonic(),
                optimizer=step.known.number,
                step=step.number,
                parameters=len(every),
                applied=applied,
                site=step.site,
            ),
            vital=True,
        )
