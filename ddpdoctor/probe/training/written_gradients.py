"""Which gradients something has written to since an averaging backward, as torch counts writes: no
value is read, so that there is time to ask all of them.

Torch does not count writes through `.data`; and what is written may be what was there.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from .tracked_model import Model
from .write_counts import version

ASKED_AT_MOST = 256
"""Gradients of a model, evenly chosen."""


class WrittenGradients:
    """The gradients of one model since a backward.

    Attributes:
        positions: those that were written to, or are other tensors, by the program itself.
    """

    def __init__(self, model: Model, positions: list[int]) -> None:
        chosen = positions[:: max(1, -(-len(positions) // ASKED_AT_MOST))]
        self._model = model
        self._known = {p: _standing(model, p) for p in chosen}
        self.positions: frozenset[int] = frozenset()

    def look(self) -> None:
        """Find what was written to since the last look."""
        now = {p: _standing(self._model, p) for p in self._known}
        if now != self._known:
            self.positions |= {p for p, standing in now.items() if standing != self._known[p]}
            self._known = now

    def pass_over(self) -> bool:
        """What was written to since the last look was none of the program's own doing; whether
        anything was."""
        before, self._known = self._known, {p: _standing(self._model, p) for p in self._known}
        return before != self._known

    def besides(self, looked_at: list[int], held: Set[int]) -> frozenset[int]:
        """Those among these that were written to, where it was none whose value is looked at: that
        tells otherwise whether a write changes anything."""
        return self.positions & held if self.positions.isdisjoint(looked_at) else frozenset()


def _standing(model: Model, position: int) -> tuple[int, int]:
    parameter = model.parameters[position]()
    gradient: Any = None if parameter is None else parameter.grad
    return id(gradient), version(gradient)
