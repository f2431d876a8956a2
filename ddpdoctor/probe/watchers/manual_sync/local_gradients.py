"""Which gradients has a rank computed before the first `all_to_all` of a backward?

They hold nothing of other ranks: their parameters come after the last `all_to_all` of the forward,
where each rank goes on with samples of its own. Tables and experts that are divided come before it.
"""

from __future__ import annotations

from typing import Any

from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...recording.weak_references import Reference
from ...tensors.tensor_watch import TensorWatch, grad_of, marks
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.records import Backward
from .exchanges import Exchanges
from .limits import FIGURES

BEGIN, SWAPPED = "begin", "swapped"


class _Followed:
    """The gradients of one optimizer's parameters; `local`: positions, in the last backward."""

    def __init__(self, parameters: list[Reference]) -> None:
        self.parameters = parameters
        self.gradients = TensorWatch(range(len(parameters)), self._read, marks)
        self.local: list[int] = []

    def _read(self, positions: list[int]) -> list[Any]:
        return [grad_of(self.parameters[position]()) for position in positions]


class LocalGradients(Watcher):
    """
    Attributes:
        followed: by number of the optimizer.
        passed: `Exchanges.numbers_passed` after the last `all_to_all` before a backward.
        waits: a backward runs that has made no `all_to_all` yet.
    """

    lost = "gradients that are computed from a rank's own samples beside all_to_all"
    after = (Exchanges,)  # counts the numbers

    def __init__(self) -> None:
        self.followed: dict[int, _Followed] = {}
        self.passed = 0
        self.waits = False
        self._following = Subscriptions()

    def follow(self, optimizer: int, parameters: list[Reference]) -> None:
        """Watch the backwards that come next."""
        self.followed[optimizer] = _Followed(parameters)
        self._following.enable()

    def leave(self, optimizer: int) -> list[int]:
        """Watch no more; the positions that were local in the last backward."""
        followed = self.followed.pop(optimizer, None)
        self._following.enable(bool(self.followed))
        return followed.local if followed is not None else []

    @on(lifecycle.backward_begins, during="_following")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        self.waits = True
        for followed in self.followed.values():
            followed.gradients.keep(BEGIN)
            followed.local = []

    @on(call_hooks.called, during="_following")
    def _called(self, recorder: Recorder, call: Call) -> None:
        if not (call.op.startswith("all_to_all") and call.carries_values):
            return
        if not Backwards.current.running():
            self.passed = Exchanges.current.numbers_passed
            return
        size = sum(tensor.numel() for tensor in call.tensors)
        between = Exchanges.current.numbers_passed - size - self.passed
        if self.waits and between < FIGURES:
            for followed in self.followed.values():
                followed.local = followed.gradients.changed(BEGIN)
                followed.gradients.keep(SWAPPED)
        self.waits = False

    @on(lifecycle.backward_ends, during="_following")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        self.waits = False
        for followed in self.followed.values():
            if followed.local:
                later = followed.gradients.changed(SWAPPED)
                followed.local = [p for p in followed.local if p not in later]
