"""How often indices were read, of all ranks together."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

MOST_DENSE = 1 << 26
"""Longer datasets are counted index by index, not in one array."""


class Tally:
    """Counts what ranks read of one dataset.

    Attributes:
        delivered: samples in all; distinct: different ones.
        within: how many indices a rank read once, twice, ...; summed over the ranks.
    """

    def __init__(self, length: int, read: Iterable[Sequence[int]]) -> None:
        """`read`: the indices that each rank read."""
        self.delivered = self.distinct = 0
        self.within: Counter[int] = Counter()
        self._length = length
        dense = 0 < length <= MOST_DENSE
        self._readers: array[int] | Counter[int] = (
            array("I", bytes(4 * length)) if dense else Counter()
        )
        self._again: Counter[int] = Counter()
        self._shared: set[int] = set()
        for indices in read:
            self._add(indices)

    def _add(self, indices: Sequence[int]) -> None:
        different = set(indices)
        self.delivered += len(indices)
        self.distinct += len(different)
        if len(different) == len(indices):
            self.within[1] += len(indices)
        else:
            times = Counter(indices)
            self.within.update(times.values())
            self._again.update({i: n - 1 for i, n in times.items() if n > 1})
        if isinstance(self._readers, array) and indices and not self._fits(indices):
            self._readers = Counter({i: n for i, n in enumerate(self._readers) if n})
        readers, shared = self._readers, self._shared
        if not any(map(readers.__getitem__, different)):
            for i in different:
                readers[i] = 1
            return
        for i in different:
            if readers[i]:
                shared.add(i)
                self.distinct -= 1
            readers[i] += 1

    def _fits(self, indices: Sequence[int]) -> bool:
        return min(indices) >= 0 and max(indices) < self._length

    def __contains__(self, index: int) -> bool:
        """Whether any rank read it."""
        return self._readers[index] > 0

    @cached_property
    def shared(self) -> list[int]:
        """Indices that more than one rank read."""
        return sorted(self._shared)

    @cached_property
    def repeated(self) -> dict[int, int]:
        """Indices that were read more than once, and how often."""
        found = sorted({*self._shared, *self._again})
        return {i: self._readers[i] + self._again[i] for i in found}

    @cached_property
    def times(self) -> Counter[int]:
        """How many indices were read once, twice, ..."""
        times = Counter(self.repeated.values())
        if alone := self.distinct - len(self.repeated):
            times[1] = alone
        return times
