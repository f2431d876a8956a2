"""Which gradients the program has written to since a synchronised backward, by torch's version
counters. No value is read, so that many gradients can be asked.

torch does not count writes through `.data`; and a write need not change a value.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from .tracked_model import Model
from .write_counts import version

ASKED_AT_MOST = 256
"""Gradients of a model that are asked, evenly chosen: bounds the time per step."""


class WrittenGradients:
    """The gradients of one model since a backward.

    Attributes:
        positions: of gradients that the program itself wrote to, or replaced by another tensor.
    """

    def __init__(self, model: Model, positions: list[int]) -> None:
        chosen = positions[:: max(1, -(-len(positions) // ASKED_AT_MOST))]
        self._model = model
        self._known = {p: _identity_and_version(model, p) for p in chosen}
        self.positions: frozenset[int] = frozenset()

    def look(self) -> None:
        """Add the gradients that were written to since the last look."""
        now = {p: _identity_and_version(self._model, p) for p in self._known}
        if now != self._known:
            self.positions |= {p for p, standing in now.items() if standing != self._known[p]}
            self._known = now

    def pass_over(self) -> bool:
        """Discard the writes since the last look, as torch made them; returns whether there were
        any."""
        before, self._known = (
            self._known,
            {p: _identity_and_version(self._model, p) for p in self._known},
        )
        return before != self._known

    def besides(self, looked_at: list[int], held: Set[int]) -> frozenset[int]:
        """The written positions among `held`; empty if any of those in `looked_at` was written to:
        their values are known, and show whether the writes changed anything."""
        return self.positions & held if self.positions.isdisjoint(looked_at) else frozenset()


def _identity_and_version(model: Model, position: int) -> tuple[int, int]:
    parameter = model.parameters[position]()
    gradient: Any = None if parameter is None else parameter.grad
    return id(gradient), version(gradient)
