"""Does `fully_shard` ever reduce the gradients that an optimizer is to apply?

With `set_requires_gradient_sync(False)` it keeps unsharded gradients to itself and the optimizer
finds none. Looked at before an optimizer's steps until it has applied a gradient.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from ....events import KeptBack
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import fully_shards, has_unreduced_gradient, shards
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from ...training.records import Step


class Waiting:
    """An optimizer that has not applied a sharded gradient yet.

    Attributes:
        shards: FSDP's own records of its parameters.
        emitted: a step without gradients is on record.
    """

    def __init__(self, shards: list[Any]) -> None:
        self.shards = [weakref.ref(shard) for shard in shards]
        self.emitted = False


class FSDPNoSync(Watcher):
    lost = "whether `fully_shard` reduces gradients"

    def __init__(self) -> None:
        # Subscription to every step, while an optimizer has not applied any gradient.
        self._following = Subscriptions()

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        optimizer = step.optimizer()
        if step.number or optimizer is None or not fully_shards():
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        every = [
            s
            for module in ModuleOrigins.current.living_modules()
            for s in shards(module)
            if id(s.sharded_param) in held
        ]
        if every:
            step.known.notes[Waiting] = Waiting(every)
            self._following.enable()
            self._step_begins(recorder, step)

    @on(lifecycle.step_begins, during="_following")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        waiting = step.known.notes.get(Waiting)
        if waiting is None:
            return
        every = [shard for ref in waiting.shards if (shard := ref()) is not None]
        given = [shard for shard in every if shard.sharded_param.grad is not None]
        # A gradient beside a kept-back one is made of zeros: torch's checkpointing makes those to
        # have the optimizer initialise its state.
        applied = not all(map(has_unreduced_gradient, given))
        if applied:
            del step.known.notes[Waiting]
            self._following.enable(
                any(Waiting in known.notes for known in Optimizers.current.known())
            )
        kept = not given and not waiting.emitted and any(map(has_unreduced_gradient, every))
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
