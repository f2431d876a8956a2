"""Does the program reduce copies, or gather values, and then not use the results?

Copies of gradients, where it steps with the originals; other values, where nobody reads what was
reduced or gathered.

The norms of the exchanged copies and of the gradients are compared before a step: where they are
equal, the result of the collective went unused.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ....events import ResultDropped
from ...collectives import call_hooks
from ...collectives.call_hooks import Call, Issued
from ...collectives.process_groups import ProcessGroups
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...source.passthrough import Dropped, dropped, handle_dropped, returned_and_dropped
from ...tensors.collective_payload import memory_of
from ...tensors.digests import readable
from ...tensors.limits import FLAT
from .exchanges import Exchanges
from .limits import COPIES_FIRST, COPIES_LAST

MANY = 2
"""Times that a result is dropped before it is told: once may be a trial of the connection."""

TO_ONE = ("reduce", "gather", "gather_object", "scatter")
"""Collectives in which most ranks only send: they need not wait."""

_PLAIN = ("ddpdoctor.", "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d")
"""Modules of the collectives that write into their arguments."""

CALLS_AT_MOST = 1000
"""Calls that are looked at, of all lines: to find the line of each costs time."""


class DroppedResults(Watcher):
    """
    Attributes:
        seen: by file and line of the collective, and whether it is about the handle of an
            asynchronous one, how often that or the result was dropped; `MANY` where it is used, or
            told.
        calls: looked at so far.
        op: the last call; empty for one whose result says nothing.
    """

    lost = "results of collectives that are dropped"

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int, bool], int] = {}
        self.calls = 0
        self.op = ""

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        alone = ProcessGroups.current.alone(call.group)
        self.op = "" if call.p2p or call.op == "barrier" or alone else call.op
        frame = self._caller(recorder, handle=False)
        if frame is None or self.op == "broadcast":
            return
        import torch

        returns = _through_library(frame)
        found = returned_and_dropped(frame) if returns else dropped(frame)
        # A library may call from the forward of an autograd function, which runs without gradients.
        learns = returns or torch.is_grad_enabled()
        learns = learns and any(t.requires_grad for t in call.tensors)
        self._tell(recorder, frame, found, learns=learns)

    @on(call_hooks.issued)
    def _issued(self, recorder: Recorder, _: Issued) -> None:
        if self.op in TO_ONE:
            return
        frame = self._caller(recorder, handle=True)
        if frame is not None and not _through_library(frame):
            self._tell(recorder, frame, handle_dropped(frame), handle=True)

    def _caller(self, recorder: Recorder, *, handle: bool) -> FrameType | None:
        """The function of the program that makes the call, where its line is to be looked at."""
        if not recorder.step or self.calls >= CALLS_AT_MOST or not self.op:
            return None
        self.calls += 1
        frame = recorder.sites.user_frame(sys._getframe(2))
        if frame is None or self.seen.get(_place(frame, handle), 0) >= MANY:
            return None
        return frame

    def _tell(
        self,
        recorder: Recorder,
        frame: FrameType,
        found: Dropped | None,
        *,
        learns: bool = False,
        handle: bool = False,
    ) -> None:
        place = _place(frame, handle)
        self.seen[place] = MANY if found is None else self.seen.get(place, 0) + 1
        if found is not None and self.seen[place] == MANY:
            recorder.emit(
                ResultDropped(
                    at=time.monotonic(),
                    name=found.name,
                    site=recorder.site(),
                    dropped_site=recorder.sites.number(found.code, found.line),
                    step=recorder.step,
                    op=self.op,
                    copy=found.copy,
                    learns=learns,
                    handle=handle,
                )
            )


def _place(frame: FrameType, handle: bool) -> tuple[str, int, bool]:
    return frame.f_code.co_filename, frame.f_lineno, handle


def _through_library(user: FrameType) -> bool:
    """Whether a line of the user's calls the collective through functions of a library, also those
    of torch that return what they compute."""
    frame = sys._getframe(1)
    while frame is not user and frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_PLAIN):
            return True
        frame = frame.f_back
    return False


class UnusedAllreduce(Watcher):
    """The tensors passed to collectives since the last step.

    Attributes:
        step: steps of all optimizers before it.
        passed: per tensor its memory (0 if the call leaves the tensor unchanged), number of
            elements and sum of squares.
        site: line of the last call.
    """

    lost = "exchanged gradients that are not used"
    after = (Exchanges,)  # records what the program exchanges itself

    def __init__(self) -> None:
        self.step = 0
        self.passed: list[tuple[int, int, float]] = []
        self.site = -1

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        step = recorder.step
        if (
            step > COPIES_LAST
            or (step >= COPIES_FIRST and step & (step - 1))
            or not call.carries_values
        ):
            return
        if step != self.step:
            self.step, self.passed, self.site = step, [], -1
        for tensor in call.tensors:
            if tensor.is_floating_point() and readable(tensor):
                memory = 0 if call.gathers else memory_of(tensor)
                self.passed.append((memory, tensor.numel(), _squared_norm(tensor)))
                self.site = recorder.site()

    def norm_ratio(self, recorder: Recorder, parameters: Sequence[Any]) -> tuple[float, int]:
        """Norm of the exchanged copies divided by the norm of the gradients, and the line of the
        call.

        (0, -1) if the copies do not match the gradients in size, or any is not on the CPU or not
        finite. To be called just before the step.
        """
        gradients = [p.grad for p in parameters if p is not None and p.grad is not None]
        nothing = (0.0, -1)
        if recorder.step != self.step or not all(map(readable, gradients)):
            return nothing
        own = {memory_of(t) for t in (*parameters, *gradients) if t is not None}
        handed = [(n, squares) for memory, n, squares in self.passed if memory not in own]
        copies = _copies(handed, [g.numel() for g in gradients])
        applied, shared = sum(map(_squared_norm, gradients)), sum(copies)
        known = copies and applied and math.isfinite(applied) and math.isfinite(shared)
        return (math.sqrt(shared / applied), self.site) if known else nothing


def _copies(handed: list[tuple[int, float]], sizes: list[int]) -> list[float]:
    """Sums of squares of the exchanged tensors that match the gradients' sizes one by one, or else
    of the largest ones that together are about as long as all gradients (flat buffers).

    Smaller tensors may be left over: most programs also reduce a loss.
    """
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


def _squared_norm(tensor: Any) -> float:
    import torch

    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        return float(torch.linalg.vector_norm(tensor)) ** 2
