"""The timeline: what the ranks did in the last steps, and around the step of each finding.

Every rank has two lanes: the phases of its steps, which are shares of the step's time in the order
in which they usually follow each other, and its calls, whose times are exact. Only the last calls
of a rank are on record. Positions are shares of the window, in percent, so that the picture can be
stretched without its texts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...events import ExceptionRaised, GroupReady, Pace, RankExiting, Signature, StepDone
from ...report.findings import Report
from ...run import Rank, Run, State, counted, ranks_text
from ..safe_text import clean, duration
from ..trace import Clock
from .axis import round_marks
from .findings import finding_names
from .window import Bar, Mark, Wait, Window

MOST_RANKS, MOST_WINDOWS = 12, 4
MOST_COMPARED, WAITED_FOR = 64, 3
"""Ranks of which the calls are compared, in runs that have no more; for which others wait most."""
STEPS_SHOWN, CALLS_SHOWN = 8, 12
"""Records of steps in the last window, or calls where no steps are on record."""
AROUND = 2
"""Steps before and after that of a finding."""
MOST_TICKS = 6
MOST_CALLS, MOST_WAITS = 120, 40
"""Calls of a rank and waits between ranks that are drawn in a window, the longest ones."""
LATE = 0.02
"""A rank that comes later than that share of the window is shown to be waited for."""
NARROWEST = 0.04
"""Percent of the window below which a phase is not drawn."""

KINDS = (
    "loading", "forward", "backward", "optimizer", "outside", "waiting", "communication", "ddp",
    "open",
)  # fmt: skip
"""Of bars, in the order of the legend: accounts of the time ledger, and calls."""

TOP, LANE, TRACK, FOOT = 22, 46, 17, 14
"""Pixels: above the lanes, of the lanes of one rank, of one lane, below for names of findings."""


@dataclass(frozen=True)
class _Span:
    begin: float
    end: float

    def at(self, seconds: float) -> float:
        """In percent; times outside are at the edge."""
        share = (seconds - self.begin) / max(self.end - self.begin, 1e-9)
        return round(100 * min(max(share, 0.0), 1.0), 3)

    def meets(self, begin: float, end: float) -> bool:
        return begin < self.end and end > self.begin


@dataclass(frozen=True)
class _Step:
    """A record of one step or several: when, and the shares of its phases in seconds."""

    first: int
    last: int
    begin: float
    end: float
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class _Asked:
    """A window to be drawn, around the `step` of a `finding`; empty and -1 for the last steps."""

    span: _Span
    finding: str
    title: str
    step: int


Key = tuple[str, int]
"""A collective: the name of its group and its number in it, which are the same on all ranks."""


@dataclass(frozen=True)
class _Made:
    """A call; `end` is infinite where the rank never left it, `key` None for a message."""

    begin: float
    end: float
    op: str
    key: Key | None

    @property
    def open(self) -> bool:
        return self.end == math.inf


@dataclass(frozen=True)
class _Lane:
    """A rank; `last` is when a step or a call of it was last seen to begin or to end."""

    rank: Rank
    steps: tuple[_Step, ...]
    calls: tuple[_Made, ...]
    last: float


def windows(report: Report, run: Run) -> list[Window]:
    """The last steps first, then those around findings; empty where no time is on record."""
    shown = _shown(report, run)
    compared = run.ranks.values() if len(run.ranks) <= MOST_COMPARED else shown
    clock = Clock(run, compared)
    every = {rank.rank: _lane(rank, clock) for rank in compared}
    lanes = [every[rank.rank] for rank in shown]
    more = len(run.ranks) - len(shown)
    left_out = f"{counted(more, 'more rank')} of the run not drawn" if more > 0 else ""
    found = []
    last = _last_steps(lanes)
    if last is not None:
        what = "steps" if any(lane.steps for lane in lanes) else "calls"
        spans = [_Asked(last, "", f"The last {what}", -1), *_around_findings(report, lanes, last)]
        for asked in spans[:MOST_WINDOWS]:
            flags = _flags(report, run, asked.span)
            drawn = _Drawn(lanes, every, asked, clock, flags)
            found.append(drawn.window(left_out))
    return [window for window in found if window.bars]


def _shown(report: Report, run: Run) -> list[Rank]:
    """Ranks that findings name, and those for which others wait most, come before others; in the
    order of their numbers."""
    named = [r for f in report.findings for r in f.ranks if len(f.ranks) < len(run.ranks)]
    waited: dict[int, float] = defaultdict(float)
    for rank, seconds in (pair for row in report.ledger for pair in row.waiting_for.items()):
        waited[int(rank) if rank.isdecimal() else -1] += seconds
    most = sorted(waited, key=lambda r: -waited[r])[:WAITED_FOR]
    order = dict.fromkeys([*named, *most, *run.ranks])
    chosen = [r for r in order if r in run.ranks][:MOST_RANKS]
    return [run.ranks[r] for r in sorted(chosen)]


def _lane(rank: Rank, clock: Clock) -> _Lane:
    ops = {s.id: clean(s.op, 60) for s in rank.of(Signature)}
    names = {g.group: g.name for g in rank.of(GroupReady) if g.member}
    steps = tuple(_steps(rank, clock))
    calls = []
    for call in rank.ring.calls if rank.ring else ():
        if call.state is not State.VOID and call.began:
            begin = clock.at(rank, call.began) / 1e6
            end = clock.at(rank, call.ended) / 1e6 if call.ended else math.inf
            numbered = call.index >= 0 and call.group in names
            key = (names[call.group], call.index) if numbered else None
            calls.append(_Made(begin, end, ops.get(call.signature, "a call"), key))
    times = [s.end for s in steps] + [c.begin if c.open else c.end for c in calls]
    return _Lane(rank, steps, tuple(calls), max(times, default=-math.inf))


def _steps(rank: Rank, clock: Clock) -> Iterator[_Step]:
    """Of the optimizer that took the most."""
    records = rank.of(StepDone)
    taken = Counter(e.optimizer for e in records)
    busiest = max(taken, key=lambda o: (taken[o], -o), default=-1)
    paces = sorted((p for p in rank.of(Pace) if p.optimizer == busiest), key=lambda p: p.step)
    place = 0
    for record in records:
        if record.optimizer != busiest or record.wall_s <= 0:
            continue
        while place < len(paces) and paces[place].step < record.step:
            place += 1
        pace = paces[place] if place < len(paces) else None
        covered = pace is not None and pace.step - pace.count < record.step <= pace.step
        waited = pace.waited_s * record.count if pace is not None and covered else 0.0
        end = clock.at(rank, record.at) / 1e6
        first = record.step - max(record.count, 1) + 1
        parts = _parts(record, waited)
        if record is records[0]:  # its time is counted from the start of the program
            parts = tuple(part for part in parts if part[0] != "outside")
        begin = end - sum(seconds for _, seconds in parts)
        yield _Step(first, record.step, begin, end, parts)


def _parts(record: StepDone, waited: float) -> tuple[tuple[str, float], ...]:
    """The shares of a step; what it waited is taken out of the backward, then of other code."""
    spent = record.data_s + record.forward_s + record.backward_s + record.optimizer_s
    other = max(0.0, record.wall_s - spent)
    inside = min(waited, record.backward_s)
    outside = min(waited - inside, other)
    return (
        ("outside", other - outside),
        ("loading", record.data_s),
        ("forward", record.forward_s),
        ("backward", record.backward_s - inside),
        ("waiting", inside + outside),
        ("optimizer", record.optimizer_s),
    )


def _last_steps(lanes: Sequence[_Lane]) -> _Span | None:
    """The end of the run, as long as the last records of the rank in which they are longest."""
    end = max((lane.last for lane in lanes), default=-math.inf)
    if end == -math.inf:
        return None
    lengths = []
    for lane in lanes:
        begins = [s.begin for s in lane.steps[-STEPS_SHOWN:]]
        begins = begins or [c.begin for c in lane.calls[-CALLS_SHOWN:]]
        if begins:
            lengths.append(lane.last - begins[0])
    length = max(lengths, default=0.0) or 1e-3
    waits = any(call.open for lane in lanes for call in lane.calls)
    return _Span(end - 1.04 * length, end + (0.25 if waits else 0.04) * length)


def _around_findings(report: Report, lanes: Sequence[_Lane], last: _Span) -> list[_Asked]:
    """A window for each finding whose first step is on record and not in the last steps."""
    found: list[_Asked] = []
    for finding, name in zip(report.findings, finding_names(report.findings), strict=True):
        here = finding.attempt is None  # the records are those of the last attempt
        step = finding.steps.first if finding.steps and here else -1
        near = [
            s
            for lane in lanes
            for s in lane.steps
            if s.first <= step + AROUND and s.last >= step - AROUND
        ]
        if step < 0 or not any(s.first <= step <= s.last for s in near):
            continue
        first = min(s.begin for s in near if s.last >= step)
        usual = sorted(s.end - s.begin for s in near)[len(near) // 2]
        begin = max(min(s.begin for s in near), first - 2 * AROUND * usual)
        span = _Span(begin, max(s.end for s in near))
        known = any(a.step == step for a in found)
        if span.end <= last.begin + 0.5 * (last.end - last.begin) and not known:
            found.append(_Asked(span, name, f"Around step {step}, the first one of", step))
    return found


def _flags(report: Report, run: Run, span: _Span) -> list[Mark]:
    """Where findings begin."""
    flags = []
    for finding, name in zip(report.findings, finding_names(report.findings), strict=True):
        at = finding.at - run.started
        if finding.at and finding.attempt is None and span.begin <= at <= span.end:
            flags.append(Mark(span.at(at), 0, f"{name} begins", "flag", name))
    return flags


class _Drawn:
    """The bars, waits and marks of one window."""

    def __init__(
        self,
        lanes: Sequence[_Lane],
        every: Mapping[int, _Lane],
        asked: _Asked,
        clock: Clock,
        flags: Sequence[Mark],
    ) -> None:
        """`every`: also lanes that are not shown, by rank."""
        self._every = every
        self._lanes, self._asked, self._clock = lanes, asked, clock
        self._span = asked.span
        self._row = {lane.rank.rank: n for n, lane in enumerate(lanes)}
        self._flags = flags
        self._groups: dict[str, set[int]] = {}
        self._came = self._arrivals()

    def window(self, left_out: str) -> Window:
        bars = [bar for n, lane in enumerate(self._lanes) for bar in self._bars(n, lane)]
        marks = [mark for n, lane in enumerate(self._lanes) for mark in self._marks(n, lane)]
        return Window(
            name=f"timeline-{self._asked.finding or 'last'}",
            title=self._asked.title,
            finding=self._asked.finding,
            ranks=tuple(f"rank {lane.rank.rank}" for lane in self._lanes),
            bars=tuple(bars),
            waits=tuple(self._waits()),
            marks=(*self._flags, *marks),
            ticks=tuple(self._ticks()),
            height=TOP + LANE * len(self._lanes) + (FOOT if self._flags else 0),
            more=left_out,
            kinds=tuple(k for k in KINDS if any(bar.kind == k for bar in bars)),
        )

    def _ticks(self) -> Iterator[tuple[float, str]]:
        for at, text in round_marks(self._span.begin, self._span.end, MOST_TICKS):
            yield self._span.at(at), f"{text} s"

    def _bars(self, row: int, lane: _Lane) -> Iterator[Bar]:
        y = TOP + LANE * row
        for step in lane.steps:
            if self._span.meets(step.begin, step.end):
                yield from self._phases(y, lane, step)
        calls = [c for c in lane.calls if self._span.meets(c.begin, c.end)]
        calls = sorted(calls, key=lambda c: c.begin - c.end)[:MOST_CALLS]
        for call in sorted(calls, key=lambda c: c.begin):
            yield from self._call(y + TRACK + 3, lane, call)

    def _phases(self, y: int, lane: _Lane, step: _Step) -> Iterator[Bar]:
        count = step.last - step.first + 1
        title = f"step {step.last}" if count == 1 else f"steps {step.first}-{step.last}"
        if step.first <= self._asked.step <= step.last:
            x = self._span.at(step.begin)
            yield Bar(x, round(self._span.at(step.end) - x, 3), y - 3, "band", title)
        begin = step.begin
        for kind, seconds in step.parts:
            x, end = self._span.at(begin), self._span.at(begin + seconds)
            begin += seconds
            if end - x >= NARROWEST:
                said = f"{ranks_text([lane.rank.rank])}, {title}: {kind} {duration(seconds)}"
                yield Bar(x, round(end - x, 3), y, kind, said)

    def _call(self, y: int, lane: _Lane, call: _Made) -> Iterator[Bar]:
        rank = ranks_text([lane.rank.rank])
        x, edge = self._span.at(call.begin), self._span.at(call.end)
        if call.open:
            said = f"{rank}: {call.op}, never left"
            yield Bar(x, round(100 - x, 3), y, "open", said, call.op)
            return
        took = f"{rank}: {call.op}, {duration(call.end - call.begin)}"
        if call.op.startswith("DDP "):
            yield Bar(x, _wide(edge - x), y, "ddp", took)
            return
        came = self._came.get(call.key, {}) if call.key else {}
        if call.key and came and self._absent(call.key):
            yield Bar(x, _wide(edge - x), y, "waiting", f"{took}, other ranks never came")
            return
        last = max(came.values(), default=call.begin)
        middle = self._span.at(min(last, call.end))
        if middle - x >= NARROWEST:
            said = f"{took}, {duration(last - call.begin)} of it until the last rank came"
            yield Bar(x, round(middle - x, 3), y, "waiting", said)
        else:
            middle = x
        yield Bar(middle, _wide(edge - middle), y, "communication", took)

    def _arrivals(self) -> dict[Key, dict[int, float]]:
        """By collective, when each rank came; only those of which all members are known."""
        came: dict[Key, dict[int, float]] = {}
        for lane in self._every.values():
            for call in lane.calls:
                if call.key and self._span.meets(call.begin, call.end):
                    came.setdefault(call.key, {})[lane.rank.rank] = call.begin
        return {
            key: times for key, times in came.items() if self._members(key) <= self._every.keys()
        }

    def _members(self, key: Key) -> set[int]:
        """The ranks of a group; one that is never known where that is not on record."""
        if key[0] not in self._groups:
            groups = (g for x in self._every.values() for g in x.rank.of(GroupReady) if g.member)
            self._groups[key[0]] = next(({*g.ranks} for g in groups if g.name == key[0]), {-1})
        return self._groups[key[0]]

    def _waits(self) -> list[Wait]:
        """From each rank that waits to the one that comes last, or never comes."""
        found: list[tuple[float, Wait]] = []
        for key, times in self._came.items():
            if absent := self._absent(key):
                found += self._for_ever(key, times, absent)
            elif self._members(key) == times.keys():
                found += self._until_the_last(key, times)
        found.sort(key=lambda item: -item[0])
        return [wait for _, wait in found[:MOST_WAITS]]

    def _absent(self, key: Key) -> list[int]:
        """Members of a group whose records show that they never came to a call of others."""
        missing = sorted(self._members(key) - self._came.get(key, {}).keys())
        return [rank for rank in missing if self._never(rank, key)]

    def _for_ever(
        self, key: Key, times: Mapping[int, float], absent: list[int]
    ) -> Iterator[tuple[float, Wait]]:
        said = f"{ranks_text(times)} in {self._op(key, times)}: waiting for {ranks_text(absent)}"
        seen = [rank for rank in absent if rank in self._row]
        for n, rank in enumerate(r for r in times if seen and r in self._row):
            made = next(c for c in self._calls(rank) if c.key == key)
            x = 98.5 - 1.5 * (n % 4) if made.open else self._span.at(made.end)
            yield math.inf, self._wait(x, rank, seen[0], said)

    def _until_the_last(self, key: Key, times: Mapping[int, float]) -> Iterator[tuple[float, Wait]]:
        last, first = max(times, key=lambda r: times[r]), min(times.values())
        late = times[last] - first
        op, at = self._op(key, times), self._span.at(times[last])
        said = f"{op}: {ranks_text([last])} comes last, {duration(late)} after the first"
        for rank in times if last in self._row else ():
            if rank in self._row and times[last] - times[rank] >= LATE * (
                self._span.end - self._span.begin
            ):
                yield late, self._wait(at, rank, last, said)

    def _wait(self, x: float, waits: int, whom: int, said: str) -> Wait:
        y1, y2 = (TOP + LANE * self._row[r] + TRACK + 12 for r in (waits, whom))
        return Wait(round(x, 3), y1, y2, said)

    def _calls(self, rank: int) -> tuple[_Made, ...]:
        return self._every[rank].calls

    def _op(self, key: Key, ranks: Iterable[int]) -> str:
        return next((c.op for r in ranks for c in self._calls(r) if c.key == key), "a call")

    def _never(self, rank: int, key: Key) -> bool:
        """Whether the records of a rank show that it never came to a call."""
        numbers = [c.key[1] for c in self._calls(rank) if c.key and c.key[0] == key[0]]
        return bool(numbers) and max(numbers) < key[1]

    def _marks(self, row: int, lane: _Lane) -> Iterator[Mark]:
        rank, y = lane.rank, TOP + LANE * row
        raised = rank.exception
        events: Iterable[ExceptionRaised | RankExiting] = [
            *([raised] if raised is not None else ()),
            *rank.of(RankExiting),
        ]
        for event in events:
            at = self._clock.at(rank, event.at) / 1e6
            if self._span.begin <= at <= self._span.end:
                leaves = isinstance(event, RankExiting)
                said = f"rank {rank.rank}: {clean(event.describe(), 120)}"
                label = "" if leaves else clean(raised.kind if raised else "", 24)
                yield Mark(self._span.at(at), y, said, "leaves" if leaves else "fails", label)


def _wide(percent: float) -> float:
    """A width that can be seen."""
    return round(max(percent, NARROWEST), 3)
