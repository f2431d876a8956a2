"""Slow ranks in windows of steps: which rank the others wait for, since when and until when."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ...events import Pace
from ...events.timing import PHASES
from ...report.findings import Steps
from ...run import Run
from .thresholds import (
    AGREED,
    FEWEST_WINDOWS,
    LAG_SHARE,
    LASTING,
    NOTICEABLE_S,
    PASSING,
    PASSING_LEAST,
    STEADY,
)

SEGMENTS = 2 * len(PHASES)
"""Of a step: the phases, and the code after each of them."""

WALL, WAITED, DELAYED = map(attrgetter, ("wall_s", "waited_s", "delayed_s"))
"""Of a rank's step: all of it, what of it the rank waits for others, and what it has no core."""

Window = Mapping[int, Pace]
"""The records of all ranks for the same steps, by rank."""


@dataclass(frozen=True)
class SlowRank:
    """A slow rank and the windows of the run in which it is slow or in doubt.

    Attributes:
        every: all windows of the run.
        every_lag: for each of these, the slow ranks and by how many seconds a step they are slower.
        first, end: the windows `every[first:end]` in which the rank is slow or in doubt.
    """

    rank: int
    every: Sequence[Window]
    every_lag: Sequence[Mapping[int, float]]
    first: int
    end: int

    def as_far_as_known(self) -> SlowRank:
        """Extended over neighbouring windows in doubt, up to one in which the rank was not slow."""
        lags = enumerate(self.every_lag)
        known = [n for n, lag in lags if self.rank not in lag and not self._doubtful(n)]
        first = max((n + 1 for n in known if n < self.first), default=0)
        end = min((n for n in known if n >= self.end), default=len(self.every))
        return replace(self, first=first, end=end)

    def _doubtful(self, place: int) -> bool:
        """Whether the rank was behind in a window, but perhaps only because it had no core."""
        behind = self.rank in lags_in(self.every[place], alone=False)
        return behind and self.rank not in self.every_lag[place]

    @property
    def places(self) -> list[int]:
        """Indices of its windows that are not in doubt."""
        return [n for n in range(self.first, self.end) if not self._doubtful(n)]

    @property
    def windows(self) -> Sequence[Window]:
        """Its windows that are not in doubt."""
        return [self.every[n] for n in self.places]

    @property
    def slow(self) -> list[int]:
        """Indices of the windows in which it was slow."""
        return [n for n in range(self.first, self.end) if self.rank in self.every_lag[n]]

    @property
    def doubts(self) -> int:
        """How many of its windows are in doubt."""
        return self.end - self.first - len(self.places)

    @property
    def steps(self) -> Steps:
        """The steps in which it was slow, and how many could be judged."""
        seen = [w[self.rank] for w in self.windows]
        slow = sum(self.every[n][self.rank].count for n in self.slow)
        first, judged = seen[0].step - seen[0].count + 1, sum(e.count for e in seen)
        whole = not self.doubts and judged == seen[-1].step + 1 - first
        return Steps(first, seen[-1].step, slow, None if whole else judged)

    @property
    def lasted(self) -> float:
        """For about how many steps it was slow, if those between the windows were similar."""
        steps = self.steps
        return (steps.last + 1 - steps.first) * len(self.slow) / (self.end - self.first)

    @property
    def over(self) -> bool:
        """Whether it became normal again before the end of the run."""
        return self.end < len(self.every)

    @property
    def passing(self) -> bool:
        """Whether it was slow for less than a third of the run."""
        return len(self.slow) < len(self.every) // LASTING

    @property
    def lag_s(self) -> float:
        """By how many seconds a step it is slower than the median rank, not counting the time
        in which it had no core."""
        return statistics.median(self.every_lag[n][self.rank] for n in self.slow)

    def median(self, rank: int, seconds: Callable[[Pace], float]) -> float:
        """The median of what a rank spends on something in a step, seconds."""
        return statistics.median(seconds(w[rank]) for w in self.windows)

    def usual(self, rank: int, segment: int) -> float:
        """A rank's median time in a segment of the step, seconds."""
        return self.median(rank, lambda pace: pace.own_s[segment])

    @property
    def excess_s(self) -> list[float]:
        """By segment, how many seconds longer it takes than the median rank."""
        ranks = self.windows[0]
        return [
            self.usual(self.rank, i) - statistics.median_low(self.usual(r, i) for r in ranks)
            for i in range(SEGMENTS)
        ]

    def excess_in(self, window: Window, segment: int) -> float:
        """How many seconds longer it takes than the median rank in a segment of one window."""
        usual = statistics.median_low(e.own_s[segment] for e in window.values())
        return window[self.rank].own_s[segment] - usual

    def since_its_phase(self) -> SlowRank:
        """Without the first windows, in which it was slow in other phases, if enough are left."""
        whole, least = self.excess_s[self.segment], 0.5 * self.excess_s[self.segment]
        late = [self.excess_in(window, self.segment) >= least for window in self.windows]
        if whole <= 0 or True not in late or len(late) - late.index(True) < FEWEST_WINDOWS:
            return self
        first = self.places[late.index(True)]
        return replace(self, first=first) if first > self.places[0] else self

    @property
    def segment(self) -> int:
        """The segment of the step in which it loses most time; an index of a segment."""
        return max(range(SEGMENTS), key=lambda i: self.excess_s[i])


def windows_of(run: Run) -> list[Window]:
    """The windows of steps that all ranks have recorded, in order."""
    tables = {
        r.rank: {(e.optimizer, e.step): e for e in r.of(Pace) if _whole(e)}
        for r in run.ranks.values()
    }
    tables = {rank: table for rank, table in tables.items() if table}
    if len(tables) < 2:
        return []
    common = set.intersection(*(set(table) for table in tables.values()))
    return [{rank: table[key] for rank, table in tables.items()} for key in sorted(common)]


def _whole(pace: Pace) -> bool:
    """Whether a record has all phases of this version."""
    return (len(pace.own_s), len(pace.sites)) == (SEGMENTS, len(PHASES))


def lags_in(window: Window, *, alone: bool = True) -> dict[int, float]:
    """The slow ranks of a window, and by how many seconds a step they are slower than the median
    rank, if the others are seen to wait. `alone`: without the time for which they had no core; else
    the most that it may be."""
    own = {rank: sum(e.own_s) for rank, e in window.items()}
    usual = statistics.median_low(own.values())
    if not alone:
        usual = statistics.median_low(max(0.0, own[r] - e.delayed_s) for r, e in window.items())
    held = statistics.median_low(e.delayed_s for e in window.values())
    slow = {}
    for rank, e in window.items():
        lag = own[rank] - usual - (max(0.0, e.delayed_s - held) if alone else 0.0)
        if lag >= max(NOTICEABLE_S, LAG_SHARE * _wall(e)):
            slow[rank] = lag
    quick = window.keys() - slow.keys()
    waits = {r: [window[o].waited_s for o in quick or window.keys() - {r}] for r in slow}
    behind = {r: statistics.median(waits[r]) - window[r].waited_s for r in slow}
    return {r: s for r, s in slow.items() if behind[r] >= AGREED * s}


def _wall(pace: Pace) -> float:
    """How many seconds a step would take if the rank always had a core."""
    return max(0.0, pace.wall_s - pace.delayed_s)


def _since(slow: Sequence[bool]) -> int | None:
    """The index of the first window since which a rank is slow nearly all the time; None where
    there is none. `slow`: by window, whether it is slow."""
    for first in range(len(slow) - max(FEWEST_WINDOWS, len(slow) // LASTING) + 1):
        if slow[first] and sum(slow[first:]) >= STEADY * (len(slow) - first):
            return first
    return None


def slow_spans(
    windows: Sequence[Window], lags: Sequence[Mapping[int, float]]
) -> dict[int, tuple[int, int]]:
    """By slow rank, the index of its first slow window and of the one after its last."""
    if not windows:
        return {}
    slow = {rank: [rank in lag for lag in lags] for rank in windows[0]}
    lasting = {r: (first, len(s)) for r, s in slow.items() if (first := _since(s)) is not None}
    return lasting or _passing(windows, slow)


def _passing(
    windows: Sequence[Window], slow: Mapping[int, Sequence[bool]]
) -> dict[int, tuple[int, int]]:
    """The spans of ranks that were slow for a while only, and not just during warm-up; empty if
    ranks were slow at different times. `slow`: by rank and window, whether it was slow."""
    steps = [next(iter(window.values())) for window in windows]
    if len({e.optimizer for e in steps}) > 1:
        return {}
    whole = steps[-1].step - steps[0].step
    found = {}
    for rank, marks in slow.items():
        first, end = _longest(marks)
        if end - first >= PASSING_LEAST:
            lasted = steps[end - 1].step - steps[first].step + steps[first].count
            if PASSING * lasted >= whole:
                found[rank] = first, end
    if not found or max(f for f, _ in found.values()) >= min(e for _, e in found.values()):
        return {}
    late = len(windows) // LASTING
    return {r: (first, end) for r, (first, end) in found.items() if first or end >= late}


def _longest(marks: Sequence[bool]) -> tuple[int, int]:
    """The first index of the longest unbroken run of marks, and the one after its last; (0, 0) if
    there is none."""
    best, first = (0, 0), 0
    for place, marked in enumerate(marks):
        first = first if marked else place + 1
        best = max(best, (first, place + 1), key=lambda span: span[1] - span[0])
    return best
