"""DDP701."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.events import LoaderSeen, Pace
from ddpdoctor.events.pace import PHASES
from ddpdoctor.report.findings import Check, Finding, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, fold_ranks

FEWEST = 4
"""Records of a few steps each; fewer say nothing."""
NOTICEABLE_S = 0.010
SHARE = 0.2
"""Of a step that is lost to the slow rank, before it is told."""
STEADY = 0.8
LASTING = 3
"""It must be the same rank for at least a third of the run; for less it is a note."""
PASSING, PASSING_LEAST = 8, 6
"""Of a rank that was slow for a while only: without a break for an eighth of the run, at least, and
for so many stretches."""
AGREED = 0.5
"""Of its lag, the least that the others must be seen to wait."""
SHOWN_S = 0.001

Window = Mapping[int, Pace]
"""The records of all ranks of the same steps."""


class Straggler(Check):
    """The others wait for one rank in every step

    ## What it finds
    Ranks that need longer than the others for their own part of a step, while the others are seen
    to wait. It says which phase the time goes to (loading, forward, backward, optimizer, or the
    code after one of them), since which step, and what it costs.

    ## How it knows
    In stretches of eight steps (the second to the 24th, then every second one and ever fewer; none
    where steps take less than 5 ms) each rank measures its time in every phase, without that in
    collectives and in DDP's waiting for others. A rank is slow in a stretch where its own time,
    less that for which it had no core, exceeds the median rank's by 10 ms and a fifth of a step,
    while the others wait at least half of that longer than it does. It must be so from one stretch
    on to the end, in four of five, over four at least and a third of all. A rank that was slow for
    a while only is told where that is an eighth of the run, six stretches at least, without a
    break: a note, or a warning from a third on. Stretches in which it was behind, but for no longer
    than it may have lacked a core, are neither: the finding gives their number, and takes none for
    a beginning or an end. The finding is proven.

    ## Why it hurts
    Every step lasts as long as the slowest rank's. The others' steps look equally long, with a long
    backward: they are the ones that wait.

    ## How to fix it
    Look at what this rank does in that phase and the others do not: work that only rank 0 does
    (logging, images, checkpoints) belongs in a thread or in fewer steps; a slow disk or longer
    samples show in the loading; a hot or shared device in all phases alike.

    ## When it stays quiet
    Warm-up; a rank that is late now and then (evaluation, checkpoints, garbage collection); slow
    steps on a different rank each time, or for a while on one and then on another; less than a
    fifth of a step, or 10 ms; time for which a rank had no core because of other programs (of a
    loader's workers that time is not known: no loading is judged then); ranks that do not wait for
    each other; short runs.
    Waiting on the GPU (NCCL) or inside of re-entrant checkpointing is not seen, and not judged.
    """

    code = "DDP701"
    name = "straggler"
    family = "performance"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        if any(rank.waits_on_gpu for rank in run.ranks.values()):
            return "ranks wait for each other on the GPU, where the host does not see it"
        if len(_windows(run)) < FEWEST:
            return "too few stretches of eight steps of 5 ms or more of one optimizer on all ranks"
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
        begun = first.step - first.count + 1
        others = [r for r in worst.windows[0] if r not in ranks]
        waits_s = statistics.median(worst.waiting(r) for r in others) - worst.waiting(worst.rank)
        each = f"each of steps {begun}-{pace.step}" if worst.over else "each step"
        span = "a step" if worst.doubts else each
        return self.finding(
            severity=Severity.NOTE if all(s.passing for s in slow) else Severity.WARNING,
            ranks=ranks,
            steps=worst.steps,
            subjects=(phase,),
            location=rank.location(pace.sites[segment % len(PHASES)]),
            label=f"{worst.excess_s[segment] * 1e3:.0f} ms a step longer "
            + ("here" if segment < len(PHASES) else "after this line")
            + f" than on {_ranks(others)}",
            related=_related(rank, pace, segment),
            summary=f"{_ranks(others)} {'waits' if len(others) == 1 else 'wait'} "
            f"{waits_s * 1e3:.0f} of {worst.whole(worst.rank) * 1e3:.0f} ms in {span} for "
            f"{_ranks(ranks)}, which {'needs' if len(ranks) == 1 else 'need'} longer {words}",
            cause=_cause(worst, segment, words),
            fix=_FIXES[phase],
            evidence={
                "phase": phase,
                "a step, ms": [
                    {"rank": r, **{name: round(s * 1e3, 1) for name, s in parts.items()}}
                    for r, parts in _parts(worst).items()
                ],
                "stretches of steps looked at": worst.end - worst.first,
                "of them slow on this rank": len(worst.slow),
                **({"of them not to be told": worst.doubts} if worst.doubts else {}),
                "each other rank lost, seconds": round(waits_s * worst.lasted, 1),
            },
            at=rank.wall(first.at),
        )

    def explains(self, mine: Finding, other: Finding) -> bool:
        loading = mine.evidence.get("phase") == "loading"
        return loading and other.check == "data-bound" and set(other.ranks) <= set(mine.ranks)


@dataclass(frozen=True)
class _Slow:
    """A rank, and the stretches of steps of the run, with the lags of all: from the stretch
    `first` on, until before `end`, it was slow, or that is not to be told."""

    rank: int
    every: Sequence[Window]
    every_lag: Sequence[Mapping[int, float]]
    first: int
    end: int

    def as_far_as_known(self) -> _Slow:
        """Beyond stretches that are in doubt, until one in which it was not slow."""
        lags = enumerate(self.every_lag)
        known = [n for n, lag in lags if self.rank not in lag and not self._doubtful(n)]
        first = max((n + 1 for n in known if n < self.first), default=0)
        end = min((n for n in known if n >= self.end), default=len(self.every))
        return replace(self, first=first, end=end)

    def _doubtful(self, place: int) -> bool:
        """Whether it was behind there, but perhaps only for want of a core."""
        behind = self.rank in _lags(self.every[place], alone=False)
        return behind and self.rank not in self.every_lag[place]

    @property
    def places(self) -> list[int]:
        """Of the stretches that are not in doubt."""
        return [n for n in range(self.first, self.end) if not self._doubtful(n)]

    @property
    def windows(self) -> Sequence[Window]:
        return [self.every[n] for n in self.places]

    @property
    def slow(self) -> list[int]:
        """Of the stretches in which it was slow."""
        return [n for n in range(self.first, self.end) if self.rank in self.every_lag[n]]

    @property
    def doubts(self) -> int:
        return self.end - self.first - len(self.places)

    @property
    def steps(self) -> Steps:
        """Those in which it was slow, among those that could be judged."""
        seen = [w[self.rank] for w in self.windows]
        slow = sum(self.every[n][self.rank].count for n in self.slow)
        first, judged = seen[0].step - seen[0].count + 1, sum(e.count for e in seen)
        whole = not self.doubts and judged == seen[-1].step + 1 - first
        return Steps(first, seen[-1].step, slow, None if whole else judged)

    @property
    def lasted(self) -> float:
        """For about so many steps it was slow; those that were not looked at are counted alike."""
        steps = self.steps
        return (steps.last + 1 - steps.first) * len(self.slow) / (self.end - self.first)

    @property
    def over(self) -> bool:
        """It has not been slow any more since."""
        return self.end < len(self.every)

    @property
    def passing(self) -> bool:
        """It was slow for less than a third of the run."""
        return len(self.slow) < len(self.every) // LASTING

    @property
    def lag_s(self) -> float:
        return statistics.median(self.every_lag[n][self.rank] for n in self.slow)

    def whole(self, rank: int) -> float:
        return statistics.median(w[rank].wall_s for w in self.windows)

    def delayed(self, rank: int) -> float:
        return statistics.median(w[rank].delayed_s for w in self.windows)

    def usual(self, rank: int, segment: int) -> float:
        return statistics.median(w[rank].own_s[segment] for w in self.windows)

    def waiting(self, rank: int) -> float:
        return statistics.median(w[rank].waited_s for w in self.windows)

    @property
    def excess_s(self) -> list[float]:
        """By segment: how much longer than usual among the ranks."""
        ranks = self.windows[0]
        return [
            self.usual(self.rank, i) - statistics.median_low(self.usual(r, i) for r in ranks)
            for i in range(len(_PHASES))
        ]

    def excess_in(self, window: Window, segment: int) -> float:
        usual = statistics.median_low(e.own_s[segment] for e in window.values())
        return window[self.rank].own_s[segment] - usual

    def since_its_phase(self) -> _Slow:
        """Without the first stretches that were slow for another reason, if enough are left."""
        whole, least = self.excess_s[self.segment], 0.5 * self.excess_s[self.segment]
        late = [self.excess_in(window, self.segment) >= least for window in self.windows]
        if whole <= 0 or True not in late or len(late) - late.index(True) < FEWEST:
            return self
        first = self.places[late.index(True)]
        return replace(self, first=first) if first > self.places[0] else self

    @property
    def segment(self) -> int:
        return max(range(len(_PHASES)), key=lambda i: self.excess_s[i])


def _starved(rank: Rank, slow: _Slow) -> bool:
    """Whether it waits for processes of its loader, which have no core for an unknown time where
    the ranks themselves lack cores."""
    if slow.segment != 0:
        return False
    loops = {window[rank.rank].sites[0] for window in slow.windows}
    helped = any(e.workers and e.loop_site in loops for e in rank.of(LoaderSeen))
    return helped and max(map(slow.delayed, slow.windows[0])) >= SHARE * slow.lag_s


def _windows(run: Run) -> list[Window]:
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
    return (len(pace.own_s), len(pace.sites)) == (len(_PHASES), len(PHASES))


def _lags(window: Window, *, alone: bool = True) -> dict[int, float]:
    """Seconds a step by which ranks are slow enough to be told, for those the others wait for;
    `alone`: without the time for which they lacked a core; else as much as it may be."""
    own = {rank: sum(e.own_s) for rank, e in window.items()}
    usual = statistics.median_low(own.values())
    if not alone:
        usual = statistics.median_low(max(0.0, own[r] - e.delayed_s) for r, e in window.items())
    held = statistics.median_low(e.delayed_s for e in window.values())
    slow = {}
    for rank, e in window.items():
        lag = own[rank] - usual - (max(0.0, e.delayed_s - held) if alone else 0.0)
        if lag >= max(NOTICEABLE_S, SHARE * _wall(e)):
            slow[rank] = lag
    quick = window.keys() - slow.keys()
    waits = {r: [window[o].waited_s for o in quick or window.keys() - {r}] for r in slow}
    behind = {r: statistics.median(waits[r]) - window[r].waited_s for r in slow}
    return {r: s for r, s in slow.items() if behind[r] >= AGREED * s}


def _wall(pace: Pace) -> float:
    """How long a step would take if the rank had its core for itself."""
    return max(0.0, pace.wall_s - pace.delayed_s)


def _since(slow: Sequence[bool]) -> int | None:
    """The first stretch since which it is slow nearly all the time; None where it is not."""
    for first in range(len(slow) - max(FEWEST, len(slow) // LASTING) + 1):
        if slow[first] and sum(slow[first:]) >= STEADY * (len(slow) - first):
            return first
    return None


def _spans(
    windows: Sequence[Window], lags: Sequence[Mapping[int, float]]
) -> dict[int, tuple[int, int]]:
    """By slow rank, the stretches from which on and before which it was slow."""
    slow = {rank: [rank in lag for lag in lags] for rank in windows[0]}
    lasting = {r: (first, len(s)) for r, s in slow.items() if (first := _since(s)) is not None}
    return lasting or _passing(windows, slow)


def _passing(
    windows: Sequence[Window], slow: Mapping[int, Sequence[bool]]
) -> dict[int, tuple[int, int]]:
    """The same of ranks that were slow for a while only, and not just while the run warmed up."""
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
    """The longest stretch that is marked without a break, and the end of it; (0, 0) for none."""
    best, first = (0, 0), 0
    for place, marked in enumerate(marks):
        first = first if marked else place + 1
        best = max(best, (first, place + 1), key=lambda span: span[1] - span[0])
    return best


def _related(rank: Rank, pace: Pace, segment: int) -> tuple[Related, ...]:
    here = segment % len(PHASES)
    if segment == 0:
        made = next((e.site for e in rank.of(LoaderSeen) if e.loop_site == pace.sites[0]), -1)
        place, label = rank.location(made), "the loader"
    elif segment < len(PHASES):
        return ()
    else:
        following = [*pace.sites[here + 1 :], *pace.sites[: here + 1]]
        place = rank.location(next((s for s in following if s >= 0), -1))
        label = "and before this line"
    return (Related(label, place),) if place else ()


def _parts(slow: _Slow) -> dict[int, dict[str, float]]:
    """By rank, the step, the waiting in it, and the rank's own time, what takes most first."""
    ranks = list(slow.windows[0])
    longest = sorted(range(len(_PHASES)), key=lambda i: slow.usual(slow.rank, i), reverse=True)
    shown = [i for i in longest if any(slow.usual(r, i) >= SHOWN_S for r in ranks)]
    held = any(slow.delayed(r) >= SHOWN_S for r in ranks)
    return {
        r: {
            "step": slow.whole(r),
            "waiting": slow.waiting(r),
            **{_PHASES[i][0]: slow.usual(r, i) for i in shown},
            **({"of all that without a core": slow.delayed(r)} if held else {}),
        }
        for r in ranks
    }


def _cause(slow: _Slow, segment: int, words: str) -> str:
    excess = slow.excess_s
    usual = slow.usual(slow.rank, segment)
    reported = (
        f"{usual * 1e3:.0f} ms {words} on rank {slow.rank}, {(usual - excess[segment]) * 1e3:.0f} "
        "ms on the others"
    )
    if excess[segment] < 0.5 * slow.lag_s:
        reported += "; the rest of the time is lost in other phases: the rank is slower as a whole"
    if (delayed := slow.delayed(slow.rank)) >= SHARE * slow.lag_s:
        reported += (
            f"; the machine has more to do than cores: for {delayed * 1e3:.0f} ms of a step rank "
            f"{slow.rank} could have gone on but something else ran on its core; without that it "
            f"would still be about {slow.lag_s * 1e3:.0f} ms behind"
        )
    return f"{reported}; {_when(slow)}"


def _when(slow: _Slow) -> str:
    """From which step on it was slow, and until which one where that is over."""
    first, last = slow.windows[0][slow.rank], slow.windows[-1][slow.rank]
    since, reported = first.step - first.count + 1, "from the start on"
    if since > first.count:
        seen = slow.every[slow.first - 1][slow.rank].step if slow.first else -1
        reported = f"since {_either(seen + 1, since)}"
    if slow.over:
        after = slow.every[slow.end][slow.rank]
        reported += f", until {_either(last.step, after.step - after.count)}"
    if slow.doubts:
        reported += (
            f"; in {slow.doubts} of {slow.end - slow.first} stretches of steps it cannot be told, "
            "as ranks were without a core for a part of them"
        )
    return reported


def _either(first: int, last: int) -> str:
    return f"some step between {first} and {last}" if first < last else f"step {last}"


def _ranks(ranks: Iterable[int]) -> str:
    reported = fold_ranks(ranks)
    return f"rank{'' if reported.isdecimal() else 's'} {reported}"


_PHASES = (
    ("loading", "to load a batch"),
    ("forward", "in the forward"),
    ("backward", "in the backward"),
    ("optimizer", "in the optimizer's step"),
    ("after loading", "between a batch and the forward"),
    ("after forward", "between forward and backward"),
    ("after backward", "between the backward and the optimizer's step"),
    ("between steps", "between two steps"),
)
"""By segment: a name, and where the time goes."""

_OWN = "do this work less often, in a thread, or divided among the ranks"
_FIXES = {
    "loading": "see what this rank reads and from where: longer samples, a slower disk, fewer "
    "workers; `DataLoader(..., num_workers=4)` hides it behind the step",
    "forward": "give this rank as much work per batch as the others; look for a busy or throttled "
    "device",
    "backward": "give this rank as much work per batch as the others; look for hooks that only it "
    "has, and a busy or throttled device",
    "optimizer": "see what this rank does in the optimizer's step that the others do not",
    "after loading": _OWN,
    "after forward": _OWN,
    "after backward": _OWN,
    "between steps": _OWN,
}
