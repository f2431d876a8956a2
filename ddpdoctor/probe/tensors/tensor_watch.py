"""Was a tensor changed between two moments? By its digest, or by what torch counts about it.

A digest tells whether values changed; torch's version counter only whether the tensor was written
to, but no value is read, so that many tensors can be asked. torch does not count writes through
`.data`, and a write need not change a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .digests import digests

T = TypeVar("T")

Read = Callable[[list[int]], list[Any]]
"""The tensors at some positions as they are now, None for what is gone."""


def spread(every: Sequence[T], most: int) -> list[T]:
    """At most `most` items of a sequence, spread over it, the last one among them; the same on
    every rank."""
    step = max(1, len(every) // (most - 1))
    chosen = dict.fromkeys([*every[::step][: most - 1], *every[-1:]])
    return list(chosen)


def writes(tensor: Any) -> int:
    """How often a tensor was written to; -1 for None and inference tensors, which do not count."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def marks(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Identity and count of writes of each tensor: another mark means that it was written to, or
    that another tensor has its place."""
    return [(id(tensor), writes(tensor)) for tensor in tensors]


class TensorWatch:
    """Some tensors that are looked at again.

    Attributes:
        positions: which, for `read`.
        kept: what `by` gave for them at each moment that was named.

    Args:
        by: what is compared: `digests` of the values, or `marks`.
    """

    def __init__(
        self, positions: Sequence[int], read: Read, by: Callable[[list[Any]], list[Any]] = digests
    ) -> None:
        self.positions = list(positions)
        self._read, self._by = read, by
        self.kept: dict[str, list[Any]] = {}

    def keep(self, moment: str) -> None:
        """Note the tensors as they are now."""
        self.kept[moment] = self._by(self._read(self.positions))

    def changed(self, since: str, *, until: str = "") -> list[int]:
        """Positions of the tensors that differ from what they were: now, or `until` another
        moment."""
        now = self.kept[until] if until else self._by(self._read(self.positions))
        pairs = zip(self.positions, self.kept[since], now, strict=True)
        return [position for position, old, new in pairs if old != new]
