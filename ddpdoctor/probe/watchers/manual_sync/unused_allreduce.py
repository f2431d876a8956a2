"""Whether what the ranks hand to collectives are copies of the very gradients that are applied
afterwards: then what came of them was used by nobody."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.recorder import Recorder
from ...tensors.collective_payload import FLAT
from ...tensors.digests import readable
from ...tensors.gradient_versions import memory_of

LOST = "exchanged gradients that are not used"

EARLY = 8
LAST = 64
"""Looked at before each of the first `EARLY` steps, and then at powers of two up to the `LAST`."""


class _Window:
    """What was handed over since the step `step` of any optimizer: memory (0 where the call leaves
    that as it is), elements, and the sum of squares of each tensor; `site` is the line of the last
    call."""

    def __init__(self, step: int = -1) -> None:
        self.step = step
        self.handed: list[tuple[int, int, float]] = []
        self.site = -1


_window = _Window()


def install() -> None:
    _window.__init__()  # type: ignore[misc]
    call_hooks.called.subscribe(_called, lost=LOST)


def _called(recorder: Recorder, call: Call) -> None:
    step = recorder.step
    if step > LAST or (step >= EARLY and step & (step - 1)) or not call.carries_values:
        return
    if step != _window.step:
        _window.__init__(step)  # type: ignore[misc]
    for tensor in call.tensors:
        if tensor.is_floating_point() and readable(tensor):
            memory = 0 if call.gathers else memory_of(tensor)
            _window.handed.append((memory, tensor.numel(), _squares(tensor)))
            _window.site = recorder.site()


def share(recorder: Recorder, parameters: Sequence[Any]) -> tuple[float, int]:
    """The norm of the copies that were handed over for the step to come, by that of the gradients
    of these parameters, and the line; 0 and -1 where they are not as many, not on the CPU, or not
    finite."""
    gradients = [p.grad for p in parameters if p is not None and p.grad is not None]
    nothing = (0.0, -1)
    if recorder.step != _window.step or not all(map(readable, gradients)):
        return nothing
    own = {memory_of(t) for t in (*parameters, *gradients) if t is not None}
    handed = [(n, squares) for memory, n, squares in _window.handed if memory not in own]
    copies = _copies(handed, [g.numel() for g in gradients])
    applied, shared = sum(map(_squares, gradients)), sum(copies)
    known = copies and applied and math.isfinite(applied) and math.isfinite(shared)
    return (math.sqrt(shared / applied), _window.site) if known else nothing


def _copies(handed: list[tuple[int, float]], sizes: list[int]) -> list[float]:
    """The squares of those that are as large as the gradients one by one, or else of buffers of
    them all; beside them a loss may be handed over."""
    left = Counter(sizes)
    found = []
    for n, squares in handed:
        if left[n]:
            left[n] -= 1
            found.append(squares)
    if not left.total():
        return found
    size, carried, found = sum(sizes), 0, []
    for n, squares in sorted(handed, reverse=True):
        if carried < size:
            carried += n
            found.append(squares)
    return found if FLAT[0] * size <= carried <= FLAT[1] * size else []


def _squares(tensor: Any) -> float:
    import torch

    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        return float(torch.linalg.vector_norm(tensor)) ** 2
