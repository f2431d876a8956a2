"""DDP701: all ranks wait for the slowest one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

from ddpdoctor.analysis.process.thresholds import (
    AGREED,
    FEWEST_WINDOWS,
    LAG_SHARE,
    LASTING,
    NOTICEABLE_S,
    PASSING,
    PASSING_LEAST,
    STEADY,
)
from ddpdoctor.events import LoaderSeen, Pace
from ddpdoctor.events.timing import PHASES
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, ranks_do, ranks_text

SHOWN_S = 0.001
"""Shorter times are not listed in the evidence."""

WALL, WAITED, DELAYED = map(attrgetter, ("wall_s", "waited_s", "delayed_s"))
"""Of a rank's step: all of it, what of it the rank waits for others, and what it has no core."""

Window = Mapping[int, Pace]
"""The records of all ranks for the same steps, by rank."""


class Straggler(Check):
    """The other ranks wait for one slow rank

    ## What it finds
    Ranks that need longer than the others for their own part of a step, while the others wait. The
    finding names the phase in which the time is lost (loading, forward, backward, optimizer, or the
    code between them), the step since which it is so, and what it costs.

    ## How it knows
    Each rank measures its time in every phase, without collectives and without DDP's waits, over
    windows of eight steps (the second to the 24th window, then every second one and later fewer;
    none where steps take less than 5 ms). A rank is slow in a window if

    - its own time, without that in which it had no CPU core, exceeds that of the median rank by
      10 ms and a fifth of a step
    - the other ranks wait longer than this rank, by at least half of that

    It must be slow from some window to the end of the run, in four of five windows, at least four
    windows and a third of all. A rank that was slow for a while only is reported if this lasted for
    an eighth of the run and six windows without a break: a note, or a warning from a third of the
    run on. Windows in which the rank was behind, but perhaps only because it had no core, count
    neither way; the finding gives their number. The finding is proven.

    ## Why it hurts
    Every step takes as long as on the slowest rank. The steps of the other ranks look equally long,
    with a long backward, but these ranks wait.

    ## How to fix it
    Look for what this rank does in that phase and the others do not. Work that only rank 0 does
    (logging, images, checkpoints) belongs in a thread or in fewer steps. A slow disk or longer
    samples show in loading; a throttled or shared device shows in all phases.

    ## When it stays quiet
    - warm-up and short runs
    - a rank that is late now and then (evaluation, checkpoints, garbage collection)
    - slow steps on changing ranks
    - less than a fifth of a step, or less than 10 ms
    - time in which a rank had no core because of other programs (for the workers of a loader that
      time is not known, so loading is not judged then)
    - ranks that do not wait for each other

    Waits on the GPU (NCCL) and inside reentrant checkpointing are not seen and not judged.
    """

    code = "DDP701"
    name = "straggler"
    family = "performance"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "slow-loading": "the time is lost while a batch is loaded",
        "slow-forward": "the time is lost in the forward",
        "slow-backward": "the time is lost in the backward",
        "slow-optimizer": "the time is lost in the optimizer step",
        "slow-between-phases": "the time is lost in the program's code between the phases",
    }
    effects = (Effect(("data-bound",), of=("slow-loading",), when=(When.WITHIN_RANKS,)),)

    def unobserved(self, run: Run) -> str | None:
        if any(rank.waits_on_gpu for rank in run.ranks.values()):
            return "ranks wait for each other on the GPU, which the host does not see"
        if len(_windows(run)) < FEWEST_WINDOWS:
            return "too few windows of eight steps (5 ms or longer, of one optimizer, on all ranks)"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        windows = _windows(run)
        lags = [_lags(window) for window in windows]
        slow: dict[int, list[_Slow]] = defaultdict(list)
        for rank, (first, end) in _spans(windows, lags).items():
            found = _Slow(rank, windows, lags, first, end).as_far_as_known().since_its_phase()
            if not _starved(run.ranks[rank], found):
                slow[found.segment].append(found)
        for segment, ranks in slow.items():
            yield self._report(run, segment, ranks)

    def _report(self, run: Run, segment: int, slow: list[_Slow]) -> Finding:
        worst = max(slow, key=lambda s: s.lag_s)
        rank = run.ranks[worst.rank]
        ranks = tuple(s.rank for s in slow)
        pace = worst.windows[-1][worst.rank]
        first = worst.windows[0][worst.rank]
        phase, words = _PHASES[segment]
        between = segment >= len(PHASES)
        begun = first.step - first.count + 1
        others = [r for r in worst.windows[0] if r not in ranks]
        waits_s = statistics.median(worst.median(r, WAITED) for r in others) - worst.median(
            worst.rank, WAITED
        )
        each = f"each of steps {begun}-{pace.step}" if worst.over else "each step"
        span = "a step" if worst.doubts else each
        return self.finding(
            rule="slow-between-phases" if between else f"slow-{phase}",
            severity=Severity.NOTE if all(s.passing for s in slow) else Severity.WARNING,
            ranks=ranks,
            steps=worst.steps,
            subjects=(phase,),
            location=rank.location(pace.sites[segment % len(PHASES)]),
            label=f"rank {worst.rank} spends {worst.excess_s[segment] * 1e3:.0f} ms more per step "
            + ("after this line" if between else "here")
            + f" than {ranks_text(others)}",
            related=_related(rank, pace, segment),
            summary=f"{ranks_do(others, 'wait')} {waits_s * 1e3:.0f} of "
            f"{worst.median(worst.rank, WALL) * 1e3:.0f} ms in {span} for {ranks_text(ranks)}, "
            f"which {'is' if len(ranks) == 1 else 'are'} slower {words}",
            cause=_cause(worst, segment, words),
            fix=_MOVE_WORK if between else _FIXES[phase],
            evidence={
                "phase": phase,
                "a step, ms": [
                    {"rank": r, **{name: round(s * 1e3, 1) for name, s in parts.items()}}
                    for r, parts in _parts(worst).items()
                ],
                "windows examined": worst.end - worst.first,
                "windows in which this rank is slow": len(worst.slow),
                **({"windows in doubt (no CPU core)": worst.doubts} if worst.doubts else {}),
                "seconds lost by each other rank": round(waits_s * worst.lasted, 1),
            },
            at=rank.wall(first.at),
        )


@dataclass(frozen=True)
class _Slow:
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

    def as_far_as_known(self) -> _Slow:
        """Extended over neighbouring windows in doubt, up to one in which the rank was not slow."""
        lags = enumerate(self.every_lag)
        known = [n for n, lag in lags if self.rank not in lag and not self._doubtful(n)]
        first = max((n + 1 for n in known if n < self.first), default=0)
        end = min((n for n in known if n >= self.end), default=len(self.every))
        return replace(self, first=first, end=end)

    def _doubtful(self, place: int) -> bool:
        """Whether the rank was behind in a window, but perhaps only because it had no core."""
        behind = self.rank in _lags(self.every[place], alone=False)
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
            for i in range(len(_PHASES))
        ]

    def excess_in(self, window: Window, segment: int) -> float:
        """How many seconds longer it takes than the median rank in a segment of one window."""
        usual = statistics.median_low(e.own_s[segment] for e in window.values())
        return window[self.rank].own_s[segment] - usual

    def since_its_phase(self) -> _Slow:
        """Without the first windows, in which it was slow in other phases, if enough are left."""
        whole, least = self.excess_s[self.segment], 0.5 * self.excess_s[self.segment]
        late = [self.excess_in(window, self.segment) >= least for window in self.windows]
        if whole <= 0 or True not in late or len(late) - late.index(True) < FEWEST_WINDOWS:
            return self
        first = self.places[late.index(True)]
        return replace(self, first=first) if first > self.places[0] else self

    @property
    def segment(self) -> int:
        """The segment of the step in which it loses most time; an index of `_PHASES`."""
        return max(range(len(_PHASES)), key=lambda i: self.excess_s[i])


def _starved(rank: Rank, slow: _Slow) -> bool:
    """Whether a slow rank waits for the workers of its loader while the ranks lack cores: then the
    workers lack cores too, for a time that is not known."""
    if slow.segment != 0:
        return False
    loops = {window[rank.rank].sites[0] for window in slow.windows}
    helped = any(e.workers and e.loop_site in loops for e in rank.of(LoaderSeen))
    return (
        helped and max(slow.median(r, DELAYED) for r in slow.windows[0]) >= LAG_SHARE * slow.lag_s
    )


def _windows(run: Run) -> list[Window]:
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
    return (len(pace.own_s), len(pace.sites)) == (len(_PHASES), len(PHASES))


def _lags(window: Window, *, alone: bool = True) -> dict[int, float]:
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


def _spans(
    windows: Sequence[Window], lags: Sequence[Mapping[int, float]]
) -> dict[int, tuple[int, int]]:
    """By slow rank, the index of its first slow window and of the one after its last."""
    slow = {rank: [rank in lag for lag in lags] for rank in windows[0]}
    lasting = {r: (first, len(s)) for r, s in slow.items() if (first := _since(s)) is not None}
    return lasting or _passing(windows, slow)


def _passing(
    windows: Sequence[Window], slow: Mapping[int, Sequence[bool]]
) -> dict[int, tuple[int, int]]:
    """Like `_spans`, for ranks that were slow for a while only, and not just during warm-up; empty
    if ranks were slow at different times. `slow`: by rank and window, whether it was slow."""
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


def _related(rank: Rank, pace: Pace, segment: int) -> tuple[Related, ...]:
    here = segment % len(PHASES)
    if segment == 0:
        made = next((e.site for e in rank.of(LoaderSeen) if e.loop_site == pace.sites[0]), -1)
        place, label = rank.location(made), "the loader is created here"
    elif segment < len(PHASES):
        return ()
    else:
        following = [*pace.sites[here + 1 :], *pace.sites[: here + 1]]
        place = rank.location(next((s for s in following if s >= 0), -1))
        label = "before this line"
    return (Related(label, place),) if place else ()


def _parts(slow: _Slow) -> dict[int, dict[str, float]]:
    """By rank, the seconds of a step, of waiting in it, and of each segment, the longest first."""
    ranks = list(slow.windows[0])
    longest = sorted(range(len(_PHASES)), key=lambda i: slow.usual(slow.rank, i), reverse=True)
    shown = [i for i in longest if any(slow.usual(r, i) >= SHOWN_S for r in ranks)]
    held = any(slow.median(r, DELAYED) >= SHOWN_S for r in ranks)
    return {
        r: {
            "step": slow.median(r, WALL),
            "waiting": slow.median(r, WAITED),
            **{_PHASES[i][0]: slow.usual(r, i) for i in shown},
            **({"without a CPU core": slow.median(r, DELAYED)} if held else {}),
        }
        for r in ranks
    }


def _cause(slow: _Slow, segment: int, words: str) -> str:
    excess = slow.excess_s
    usual = slow.usual(slow.rank, segment)
    others = "the others" if len(slow.windows[0]) > 2 else "the other"
    reported = (
        f"rank {slow.rank} spends {usual * 1e3:.0f} ms {words}, {others} "
        f"{(usual - excess[segment]) * 1e3:.0f} ms, {_when(slow)}"
    )
    if excess[segment] < 0.5 * slow.lag_s:
        reported += "; the rest of its delay is in other phases: the rank is slower in general"
    if (delayed := slow.median(slow.rank, DELAYED)) >= LAG_SHARE * slow.lag_s:
        reported += (
            f"; the machine lacks cores: for {delayed * 1e3:.0f} ms of a step rank {slow.rank} was "
            "ready, but something else ran on its core; without that it would still be about "
            f"{slow.lag_s * 1e3:.0f} ms behind"
        )
    return reported


def _when(slow: _Slow) -> str:
    """Since which step the rank is slow, and until which one if it became normal again."""
    first, last = slow.windows[0][slow.rank], slow.windows[-1][slow.rank]
    since, reported = first.step - first.count + 1, "since the beginning of the run"
    if since > first.count:
        seen = slow.every[slow.first - 1][slow.rank].step if slow.first else -1
        reported = f"since {_either(seen + 1, since)}"
    if slow.over:
        after = slow.every[slow.end][slow.rank]
        reported += f", until {_either(last.step, after.step - after.count)}"
    if slow.doubts:
        reported += (
            f"; {slow.doubts} of {counted(slow.end - slow.first, 'window')} of steps are in doubt, "
            "since ranks had no core for part of them"
        )
    return reported


def _either(first: int, last: int) -> str:
    return f"a step between {first} and {last}" if first < last else f"step {last}"


_PHASES = (
    ("loading", "in loading"),
    ("forward", "in the forward"),
    ("backward", "in the backward"),
    ("optimizer", "in the optimizer step"),
    ("after loading", "between a batch and the forward"),
    ("after forward", "between forward and backward"),
    ("after backward", "between the backward and the optimizer step"),
    ("between steps", "between steps"),
)
"""By segment of the step: a name, and where the time goes. First the phases, then the code after
each of them."""

_MOVE_WORK = "do this work less often, in a thread, or split it among the ranks"
_FIXES = {
    "loading": "check what this rank reads and from where (longer samples, a slower disk, fewer "
    "workers); `DataLoader(..., num_workers=4)` overlaps loading with the step",
    "forward": "give all ranks the same work per batch; check for a busy or throttled device",
    "backward": "give all ranks the same work per batch; check for hooks that only this rank has, "
    "and for a busy or throttled device",
    "optimizer": "check what this rank does in the optimizer step that the others do not",
}
