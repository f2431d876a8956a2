"""Tensors that were handed to collectives: whether they are these tensors, or copies of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .gradient_versions import memory_of

ENOUGH = 0.5
"""Share of the elements that must have been exchanged to count as a synchronisation."""

FLAT = (0.9, 1.1)
"""Size of a flat buffer against what it holds: some leave parameters out, some pad."""


class Exchange(NamedTuple):
    """One tensor that was handed to a collective: its size and where its memory begins.

    Attributes:
        amid: in a backward or between a forward and its backward, or with gradients to come; be it
            a model's input or output.
    """

    group: int
    elements: int
    memory: int
    gathered: bool = False
    amid: bool = False


class PassedGradients(NamedTuple):
    """What collectives carried of some gradients since the backward.

    Attributes:
        positions: those that were handed over themselves or as copies, by memory and size.
        other: elements of what else was.
        group: the one that all of them were handed to, be it in flat buffers, and nothing to any
            other but single numbers; -1 for none.
        most: by elements, `ENOUGH` of them were.
    """

    positions: tuple[int, ...] = ()
    other: int = 0
    group: int = -1
    most: bool = False

    @property
    def every(self) -> bool:
        """Whether all of them were, on the default group."""
        return self.group == 0


def covers(exchanges: list[Exchange], tensors: Sequence[Any]) -> bool:
    """Whether the exchanged tensors are these tensors, copies of them, or buffers of them all."""
    total = sum(t.numel() for t in tensors)
    if not total or sum(e.elements for e in exchanges) < ENOUGH * total:
        return False
    memory = {memory_of(t) for t in tensors}
    sizes = Counter(t.numel() for t in tensors)
    elements = other = 0
    for exchange in exchanges:
        copied = exchange.memory not in memory and sizes[exchange.elements] > 0
        sizes[exchange.elements] -= copied
        flat = FLAT[0] * total <= exchange.elements <= FLAT[1] * total
        if copied or flat or exchange.memory in memory:
            elements += exchange.elements
        else:
            other += exchange.elements
    if FLAT[0] * total <= other <= FLAT[1] * total:
        elements += other
    return elements >= ENOUGH * total
