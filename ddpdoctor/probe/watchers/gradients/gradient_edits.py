"""What was done to the gradients of a model between a backward and a step: by functions of torch,
and by the program itself.

Functions that edit gradients (`clip_grad_norm_`, say) report when they begin and when they end:
changes in between are theirs, all others the program's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from functools import partial
from math import prod
from typing import Any

from msgspec.structs import replace

from ....events import Edited
from ...tensors.digests import digests, some_values
from ...tensors.tensor_watch import TensorWatch, marks, spread
from ...training.tracked_model import Model, gradients
from .limits import ASKED_AT_MOST

BEFORE, NOW = "before", "now"
"""The moments that are compared."""

Span = tuple[str, str]
Values = Sequence[Sequence[float]]
"""A few values of each tensor."""


def values(tensors: list[Any]) -> list[list[float]]:
    return [some_values([tensor]) for tensor in tensors]


class GradientEdits:
    """The gradients of one model since a synchronised backward.

    Attributes:
        looked_at: digests and values of some, at the backward and whenever they had changed.
        functions: functions of torch that wrote to any gradient of the model.
        changers: functions that changed those in `looked_at`, with the site of the call.
    """

    def __init__(self, model: Model, positions: list[int]) -> None:
        read = partial(gradients, model)
        self.looked_at = TensorWatch(positions, read, digests, values)
        self._asked = TensorWatch(spread(model.expected, ASKED_AT_MOST), read, marks)
        self._written: set[int] = set()
        self.functions: dict[str, None] = {}
        self.changers: dict[str, int] = {}
        # Between these moments the program itself changed what is looked at.
        self._own: list[Span] = []
        self._last = BEFORE
        self.looked_at.keep(BEFORE)
        self._asked.keep(BEFORE)

    def only(self, positions: Set[int]) -> GradientEdits:
        """A copy that looks at the gradients at some positions only."""
        part = copy.copy(self)
        part.looked_at, part._own = self.looked_at.only(positions), [*self._own]
        return part

    def function_begins(self) -> None:
        """A function of torch is about to change gradients: earlier changes are not its own."""
        self._written.update(self._asked.changed_again(BEFORE))
        since = self._last
        if self._changed():
            self._own.append((since, self._last))

    def function_ends(self, name: str, site: int) -> None:
        """A function of torch has returned (its call at `site`): changes since it began are its."""
        if self._asked.changed_again(BEFORE):
            self.functions[name] = None
        if self._changed():
            self.changers[name] = site

    def step_begins(self) -> None:
        self._written.update(self._asked.changed_again(BEFORE))
        self.looked_at.keep(NOW)

    def _changed(self) -> bool:
        """Whether what is looked at changed since the last moment; if so, now is one."""
        moment = str(len(self.looked_at.kept))
        self.looked_at.keep(moment)
        if not self.looked_at.changed(self._last, until=moment):
            del self.looked_at.kept[moment]
            return False
        self._last = moment
        return True

    def counted(self, held: Set[int]) -> list[int]:
        """The gradients among `held` that the program wrote to; none if it wrote to any of those
        that are looked at: their values show whether the writes changed anything."""
        told = self._written.isdisjoint(self.looked_at.positions)
        return sorted(self._written & held) if told else []

    def described(self, event: Edited) -> Edited:
        """The record of a change up to `step_begins`, with who made it."""
        every = (*self._own, (self._last, NOW))
        own = [span for span in every if self.looked_at.changed(span[0], until=span[1])]
        functions = tuple(self.functions)
        beside = bool(functions and (own or event.counted))
        return replace(
            event,
            functions=functions,
            changers=dict(self.changers),
            ratio=self._factor([(BEFORE, NOW)]),
            beside=beside,
            besides=self._factor(own) if beside else 0.0,
        )

    def _factor(self, spans: list[Span]) -> float:
        """The factor by which the gradients were multiplied in some spans; 0 if there is none."""
        kept = self.looked_at.kept
        return prod(ratio(kept[a][1], kept[b][1]) for a, b in spans) if spans else 0.0


def ratio(before: Values, now: Values) -> float:
    """The factor that all values were multiplied by; 0 if there is no such factor."""
    if [len(row) for row in before] != [len(row) for row in now]:
        return 0.0
    rows = zip(before, now, strict=True)
    pairs = [(a, b) for row in rows for a, b in zip(*row, strict=True) if a != 0]
    if not pairs:
        return 0.0
    ratios = [b / a for a, b in pairs]
    middle = sorted(ratios)[len(ratios) // 2]
    # 1e-5: the rounding of float32, twice; factors of interest differ by far more.
    if middle and all(abs(r / middle - 1) < 1e-5 for r in ratios):
        return float(f"{middle:.5g}")
    return 0.0
