"""The records of one rank about one thing (an optimizer, a model, a loader), in their order."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from ...events import Event
from ...run import Rank

E = TypeVar("E", bound=Event)

ROUNDING = 2.0**-23
"""Relative distance of neighbouring float32 values: a value that was broadcast as float32 counts as
the same."""


class Series(Generic[E]):
    """Records of one rank by the moment that they are about: a step, a call, a forward.

    Where an event is recorded only when it changes, a record holds until the next one: `at`.
    """

    def __init__(self, records: Mapping[int, E]) -> None:
        self.records = dict(sorted(records.items()))
        self._moments = list(self.records)

    def __bool__(self) -> bool:
        return bool(self.records)

    def __iter__(self) -> Iterator[int]:
        return iter(self.records)

    def at(self, moment: int) -> E | None:
        """The record that holds at a moment; None before the first one."""
        place = bisect_right(self._moments, moment)
        return self.records[self._moments[place - 1]] if place else None

    def spans(self, end: int) -> Iterator[tuple[E, int, int]]:
        """Each record with the first and the last moment for which it holds; `end`: of the last."""
        for first, after in zip(self._moments, [*self._moments, None][1:], strict=True):
            last = max(end, first) if after is None else after - 1
            yield self.records[first], first, last


def series(rank: Rank, kind: type[E], moment: str, /, **of: object) -> Series[E]:
    """The records of a kind by the field `moment`, those whose fields are equal to `of`."""
    return Series(
        {
            getattr(event, moment): event
            for event in rank.of(kind)
            if all(getattr(event, name) == value for name, value in of.items())
        }
    )


def extra_by_line(
    lines: Mapping[int, Sequence[str]], *, whole: bool = True
) -> dict[str, tuple[int, ...]]:
    """By line, the ranks that did something more often there than others did.

    Args:
        lines: by rank, the line of each time.
        whole: only where these ranks did it more often in all, too, than any other rank: others
            may do the same at another line.
    """
    counts = {rank: Counter(mine) for rank, mine in lines.items()}
    found = {}
    for line in dict.fromkeys(line for mine in lines.values() for line in mine):
        least = min(mine[line] for mine in counts.values())
        more = tuple(sorted(n for n, mine in counts.items() if mine[line] > least))
        rest = [mine.total() for n, mine in counts.items() if n not in more]
        if more and not (whole and min(counts[n].total() for n in more) <= max(rest)):
            found[line] = more
    return found


def same_value(one: object, other: object) -> bool:
    """Whether two values, or two sequences written as `a, b`, are equal up to rounding."""
    if one == other or (isinstance(one, int) and isinstance(other, int)):
        return one == other
    ours, theirs = str(one).split(", "), str(other).split(", ")
    try:
        return len(ours) == len(theirs) and all(
            math.isclose(float(a), float(b), rel_tol=ROUNDING)
            for a, b in zip(ours, theirs, strict=True)
        )
    except ValueError:  # words
        return False
