"""DDP's own timing of its gradient synchronisation, read now and then."""

from __future__ import annotations

import time
from typing import Any

from ....events import SyncTimes
from ...recording import torch_compat
from ...recording.recorder import Recorder
from ...training import lifecycle, wrapped_models
from ...training.records import Step

LOST = "how long gradients take to be averaged"

FIRST_STEP = 11
"""DDP times its first ten iterations."""

EVERY_S = 20.0


class _Times:
    due = 0.0


_times = _Times()


def install() -> None:
    _times.due = 0.0
    lifecycle.pulse.subscribe(_pulse, lost=LOST)


def _pulse(recorder: Recorder, step: Step) -> None:
    if step.number < FIRST_STEP:
        return
    now = time.monotonic()
    if now < _times.due:
        return
    _times.due = now + EVERY_S
    for model in wrapped_models.live():
        wrapper = model.ddp()
        said = torch_compat.sync_times(wrapper)
        if said.get("avg_backward_comm_time", 0) > 0:
            recorder.emit(_event(now, model.number, said))


def _event(now: float, number: int, said: dict[str, Any]) -> SyncTimes:
    sizes = str(said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes") or "")
    return SyncTimes(
        at=now,
        model=number,
        iterations=int(said.get("iteration", 0)),
        forward_s=said["avg_forward_compute_time"] / 1e9,
        backward_s=said["avg_backward_compute_time"] / 1e9,
        communication_s=said["avg_backward_comm_time"] / 1e9,
        overlap_s=said["avg_backward_compute_comm_overlap_time"] / 1e9,
        bucket_bytes=tuple(int(w) for w in sizes.split(",") if w.strip().isdigit()),
        bucket_view=bool(said.get("gradient_as_bucket_view")),
    )
