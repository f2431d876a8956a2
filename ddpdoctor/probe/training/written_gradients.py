"""Which gradients the program has written to since a synchronised backward, by torch's version
counters. No value is read, so that many gradients can be asked.

torch does not count writes through `.data`; and a write need not change a value.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

from ..tensors.tensor_watch import TensorWatch, marks
from .tracked_model import Model

ASKED_AT_MOST = 256
"""Gradients of a model that are asked, evenly chosen: bounds the time per step."""


class WrittenGradients:
    """The gradients of one model since a backward.

    Attributes:
        positions: of gradients that the program itself wrote to, or replaced by another tensor.
    """

    def __init__(self, model: Model, positions: list[int]) -> None:
        chosen = positions[:: max(1, -(-len(positions) // ASKED_AT_MOST))]
        self._watch = TensorWatch(chosen, partial(gradients, model), marks)
        self._watch.keep("last look")
        self.positions: frozenset[int] = frozenset()

    def look(self) -> None:
        """Add the gradients that were written to since the last look."""
        self.positions |= self._since_last_look()

    def pass_over(self) -> bool:
        """Discard the writes since the last look, as torch made them; returns whether there were
        any."""
        return bool(self._since_last_look())

    def _since_last_look(self) -> frozenset[int]:
        self._watch.keep("now")
        written = self._watch.changed("last look", until="now")
        self._watch.kept["last look"] = self._watch.kept["now"]
        return frozenset(written)

    def besides(self, looked_at: list[int], held: Set[int]) -> frozenset[int]:
        """The written positions among `held`; empty if any of those in `looked_at` was written to:
        their values are known, and show whether the writes changed anything."""
        return self.positions & held if self.positions.isdisjoint(looked_at) else frozenset()


def parameters(model: Model, positions: Sequence[int]) -> list[Any]:
    """The parameters at some positions; None for one that is gone."""
    return [model.parameters[position]() for position in positions]


def gradients(model: Model, positions: Sequence[int]) -> list[Any]:
    """The gradients of the parameters at some positions; None for one that has none."""
    held = parameters(model, positions)
    return [None if parameter is None else parameter.grad for parameter in held]
