"""What was the loss? Of the first steps each, later of fewer and fewer; of CPU tensors only, since
on a device the program would have to wait for it."""

from __future__ import annotations

import math
import time
from typing import Any

from ....events import LossValues
from ...recording import hooks
from ...recording.hooks import Light
from ...recording.recorder import Recorder
from ...recording.torch_compat import compiling
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Backward

EVERY_STEP = 64
"""First steps of which each is recorded; then one in two, one in four from twice as many on, ..."""

TOGETHER = 16
"""Values of one record."""


class LossWatch(Watcher):
    """
    Attributes:
        due: the next step whose loss is recorded.
        seen: steps and values that are not written yet.
    """

    lost = "the values of the loss"

    def __init__(self) -> None:
        self.due = 0
        self.seen: list[tuple[int, float]] = []
        self.plain: Any = None

    def install(self) -> None:
        import torch

        self.plain = torch.Tensor

    @on(lifecycle.backward_begins, light=Light.LEFT_OUT)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        step = recorder.step
        if step < self.due or compiling():
            return
        root: Any = next(iter(backward.roots), None)
        if type(root) is not self.plain or not root.is_cpu or root.numel() != 1:
            return
        value = root.item()
        if isinstance(value, float) and math.isfinite(value):
            self.seen.append((step, float(f"{value:.6g}")))
            self.due = step + (1 << (step // EVERY_STEP).bit_length())
            if len(self.seen) == TOGETHER:
                self._write(recorder)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        if self.seen:
            self._write(recorder)

    def _write(self, recorder: Recorder) -> None:
        steps, values = zip(*self.seen, strict=True)
        self.seen = []
        recorder.emit(LossValues(at=time.monotonic(), steps=steps, values=values))
