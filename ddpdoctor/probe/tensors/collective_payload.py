"""Whether the tensors passed to collectives are some given tensors, copies of them, or flat buffers
of them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .limits import ENOUGH_PASSED, FLAT


class Exchange(NamedTuple):
    """One tensor that was passed to a collective: its size and the address of its memory.

    Attributes:
        group: number of the process group.
        gathered: the collective gathers, and leaves the tensor as it is.
        amid: passed during a backward, or between a forward and its backward: it may be an input
            or output of the model rather than a gradient.
        layout: how a flat tensor is known to hold gradients, see `flat_layout`.
    """

    group: int
    elements: int
    memory: int
    gathered: bool = False
    amid: bool = False
    layout: str = ""


class PassedGradients(NamedTuple):
    """Which of some gradients were passed to collectives since the backward.

    Attributes:
        positions: the gradients that were passed, themselves or as copies of equal size.
        other: elements of all other tensors that were passed.
        group: the group that all gradients were passed to, themselves or in flat buffers, if no
            other group got more than single numbers; else -1.
        most: at least the share `ENOUGH_PASSED` of the elements was passed.
    """

    positions: tuple[int, ...] = ()
    other: int = 0
    group: int = -1
    most: bool = False

    @property
    def every(self) -> bool:
        """Whether all gradients were passed to the default group."""
        return self.group == 0


def memory_of(tensor: Any) -> int:
    """The address of a tensor's storage (of the values, for a sparse one). For a tensor without
    storage, a negative number of its own."""
    try:
        dense = tensor._values() if tensor.is_sparse else tensor
        return int(dense.untyped_storage().data_ptr())
    except (RuntimeError, AttributeError):
        return -id(tensor)


def covers(exchanges: list[Exchange], tensors: Sequence[Any]) -> bool:
    """Whether the exchanged tensors are at least `ENOUGH_PASSED` of some tensors: themselves,
    copies of equal size, or flat buffers of them all."""
    total = sum(t.numel() for t in tensors)
    if not total or sum(e.elements for e in exchanges) < ENOUGH_PASSED * total:
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
    return elements >= ENOUGH_PASSED * total
