"""How long does a backward of DDP, or a broadcast of buffers, wait for the other ranks?

The time from the moment when all gradients of a backward are computed to its end. Measured only
while another watcher asks for it; in light steps by `Backwards`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from ...collectives import call_hooks
from ...recording import torch_compat
from ...recording.hooks import Hook, Light, Subscriptions
from ...recording.recorder import Recorder, current
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.records import Backward
from ...training.steady_state import FastPath, steady_state


class SyncWaits(Watcher):
    """The waits of the backward that is running.

    Attributes:
        averaged: a backward has ended, of which so many seconds were waiting.
        looking: some watcher asks for them.
        handle: of the hook that runs when the backward starts.
        computed_at: when all gradients of the backward were computed, 0 before: from then on DDP
            waits for its buckets.
    """

    lost = "how long ranks wait for each other"
    averaged: ClassVar[Hook[float]] = Hook("averaged")

    def __init__(self) -> None:
        self.looking = False
        self.asked: set[str] = set()
        self.handle: Any = None
        self.computed_at = 0.0
        self._measuring = Subscriptions()
        self._queue: Callable[[Callable[[], None]], None] | None = None

    def install(self) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel

        self.around(
            DistributedDataParallel,
            "_sync_buffers",
            before=self._sync_buffers_begins,
            after=self._sync_buffers_ends,
            only=self,
            fast_path=FastPath("waits", self.lost, self._light_begins, self._light_ends),
        )

    def measure(self, by: str, on: bool) -> None:
        """A watcher asks for the waits from now on, or no longer."""
        (self.asked.add if on else self.asked.discard)(by)
        if self.looking is not bool(self.asked):
            self.looking = Backwards.current.waits = bool(self.asked)
            self._measuring.enable(self.looking)

    def _sync_buffers_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> float:
        return time.monotonic()

    def _sync_buffers_ends(self, recorder: Recorder, began: Any, result: Any, error: Error) -> None:
        if began is not None:
            call_hooks.waited.fire(recorder, time.monotonic() - began)

    def _light_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> float | None:
        """In the forward of a light step the wait is only added up."""
        plan = steady_state.expected
        return None if plan is None or plan.inside is None else time.monotonic()

    def _light_ends(self, recorder: Recorder, began: float, result: Any) -> None:
        plan, seconds = steady_state.expected, time.monotonic() - began
        if plan is not None and plan.inside is not None:
            plan.inside.waited_s += seconds
        else:
            call_hooks.waited.fire(recorder, seconds)

    @on(lifecycle.backward_begins, during="_measuring", light=Light.LEFT_OUT)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self.computed_at = 0.0
        for root in backward.roots:
            if (node := getattr(root, "grad_fn", None)) is not None:
                self._queue = self._queue or torch_compat.queue_when_computed()
                self.handle = node.register_prehook(self._backward_runs)
                return

    def _backward_runs(self, gradients: Any) -> None:  # called by torch, as the next
        try:
            self._queue(self._gradients_computed)  # type: ignore[misc]
        except Exception as error:
            if (recorder := current.recorder) is not None:
                recorder.trouble("waits", error, self.lost)

    def _gradients_computed(self) -> None:  # called by torch: nothing here can fail
        self.computed_at = time.monotonic()

    @on(lifecycle.backward_ends, during="_measuring", light=Light.LEFT_OUT)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()
            if self.computed_at:
                self.averaged.fire(recorder, time.monotonic() - self.computed_at)
