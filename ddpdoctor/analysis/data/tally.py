"""How often indices were read, of all ranks together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...events.pack import SPREAD

if TYPE_CHECKING:
    import numpy as np


class Tally:
    """Counts what ranks read of one dataset.

    Attributes:
        delivered: samples in all; distinct: different ones.
        within: how many indices a rank read once, twice, ...; summed over the ranks.
        times: how many indices were read once, twice, ...; of all ranks together.
        repeated: indices that were read more than once, and how often.
        shared: indices that more than one rank read, ascending.
    """

    def __init__(self, read: Iterable[np.ndarray]) -> None:
        """`read`: the indices that each rank read, int64."""
        import numpy as np

        self.within: Counter[int] = Counter()
        different = [np.empty(0, dtype="q")]
        repeats = [np.empty(0, dtype="q")]
        for indices in read:
            values, times = _counted(indices)
            different.append(values)
            if len(values) == len(indices):
                self.within[1] += len(values)
            else:
                self.within.update(times.tolist())
                repeats.append(np.repeat(values, times - 1))
        values, readers = _counted(np.concatenate(different))
        again, more = _counted(np.concatenate(repeats))
        times = readers.copy()
        times[values.searchsorted(again)] += more
        self.delivered, self.distinct = int(times.sum()), len(values)
        self.times = Counter(dict(_pairs(*_counted(times))))
        self.repeated = dict(_pairs(values[times > 1], times[times > 1]))
        self.shared: list[int] = values[readers > 1].tolist()
        self._values = values.astype("i") if self.distinct and values[-1] < 1 << 31 else values

    def unread(self, length: int, most: int | None = None) -> list[int]:
        """The first indices below `length` that no rank read: `most` of them, or all."""
        import numpy as np

        missing = np.ones(length, dtype=bool)
        missing[self._values[(self._values >= 0) & (self._values < length)]] = False
        found: list[int] = missing.nonzero()[0][:most].tolist()
        return found


def _counted(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ones of some integers, ascending, and how often each of them stands there."""
    import numpy as np

    if (indices[1:] > indices[:-1]).all():
        return indices, np.ones(len(indices), dtype="q")
    low = indices.min()
    if indices.max() - low >= SPREAD * len(indices):
        return np.unique(indices, return_counts=True)
    counts = np.bincount(indices - low)
    values = counts.nonzero()[0]
    return values + low, counts[values]


def _pairs(values: np.ndarray, counts: np.ndarray) -> Iterable[tuple[int, int]]:
    return zip(values.tolist(), counts.tolist(), strict=True)
