"""How long does DDP's gradient synchronisation take, by its own measurement?

Read from DDP's logging data in pulses.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import SyncTimes
from ...recording import torch_compat
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Step
from ...training.wrapped_models import WrappedModels

FIRST_STEP = 11
"""DDP times its first ten iterations and some later ones; before, there is nothing to read."""

EVERY_S = 20.0
"""DDP's figures are averages over the run, so they change slowly."""


class DDPTiming(Watcher):
    lost = "how long gradients take to be averaged"

    def __init__(self) -> None:
        self.due = 0.0

    def install(self) -> None:
        self.due = 0.0

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        if step.number < FIRST_STEP:
            return
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + EVERY_S
        for model in WrappedModels.current.live():
            wrapper = model.ddp()
            logged = torch_compat.sync_times(wrapper)
            if logged.get("avg_backward_comm_time", 0) > 0:
                recorder.emit(_event(now, model.number, logged))


def _event(now: float, number: int, logged: dict[str, Any]) -> SyncTimes:
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    return SyncTimes(
        at=now,
        model=number,
        iterations=int(logged.get("iteration", 0)),
        forward_s=logged["avg_forward_compute_time"] / 1e9,
        backward_s=logged["avg_backward_compute_time"] / 1e9,
        communication_s=logged["avg_backward_comm_time"] / 1e9,
        overlap_s=logged["avg_backward_compute_comm_overlap_time"] / 1e9,
        bucket_bytes=tuple(int(w) for w in sizes.split(",") if w.strip().isdigit()),
        bucket_view=bool(logged.get("gradient_as_bucket_view")),
    )
