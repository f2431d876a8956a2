"""The collectives of every rank, group by group, aligned by their number in the group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile

from ...events import CallBlock, CallRun, CallSite, GroupReady, Signature, Wrapped
from ...run import OF_DEVICES, Call, Location, Rank, Run, State
from ...run.steps import reported_by_total
from .models_of_calls import models_of, sites_of_several
from .shared_helpers import callers, helpers

NEW_GROUPS = -2
"""The pseudo group whose calls are `new_group` (see the call log of the probe)."""

BACKWARD = "DDP backward"

UNKNOWN = -1
"""Stands for a call of which only the number is on record (the end of a record was lost)."""

EMPTY = ("barrier", "DDP()")
"""Calls that carry no data of the program's."""

What = tuple[object, ...]
Text = tuple[str, ...]
Spots = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GroupKey:
    """A process group, under a name that is the same on all its ranks."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""

    @property
    def on_device(self) -> bool:
        """Whether calls return before they are done (see `OF_DEVICES`)."""
        return any(name in self.backend for name in OF_DEVICES)

    def __str__(self) -> str:
        if self.name == "new_group":
            return "new_group"
        return "the default group" if self.name == "0" else f"group {self.name} {list(self.ranks)}"


@dataclass(frozen=True)
class CallRecord:
    """One call of one rank.

    Attributes:
        index: the number of the call in its group.
        step: optimizer steps taken before it, -1 where that is not known.
        what: everything that must be equal on all ranks.
        text: the source lines that led to it, innermost first; spots: file and line of each.
        key: as in `CallSite`, the name in a loop over names; empty for calls that carry nothing.
        call: its slot in the ring, while it is there.
        helpers: how many callers up the line is that tells this call from others: the lines below
            are in helpers.
        joins: some rank of the run answers calls of other ranks, at the end of `Join`.
    """

    rank: Rank
    index: int
    signature: Signature
    site: CallSite | None
    step: int
    what: What
    text: Text
    call: Call | None = None
    helpers: int = 0
    spots: Spots = ()
    key: str = ""
    joins: bool = False

    @property
    def location(self) -> Location | None:
        return self.location_at(0)

    @property
    def in_join(self) -> bool:
        """Whether torch itself makes the call in a `Join` that some rank has left: there it answers
        the calls that torch makes on the other ranks."""
        return self.joins and self.site is not None and bool(self.site.internal)

    @property
    def caller(self) -> Location | None:
        """The line that called the helper in which the call is; None where it is in none."""
        return self.location_at(self.helpers) if self.helpers else None

    @property
    def arguments_depth(self) -> int:
        """How many callers up the line is from which the arguments come: lines below only pass them
        on."""
        places = self.site.places if self.site else ()
        lines = takewhile(lambda place: place.hands_on, places)
        return min(sum(1 for _ in lines), max(len(places) - 1, 0))

    def location_at(self, depth: int) -> Location | None:
        """The line `depth` callers up; None beyond the lines on record."""
        if self.site is None or (depth and depth >= len(self.site.places)):
            return None
        return self.rank.location(self.site.places[depth].site if depth else self.site.line)

    @property
    def model(self) -> int | None:
        """The number of the wrapped model that makes the call, as in `models`; None where that is
        not known, or it is several."""
        made = tuple(self.models)
        return made[0] if len(made) == 1 else None

    @property
    def models(self) -> dict[int, Wrapped]:
        """The wrapped models that make the call, by their numbers in the order of wraps in their
        group, which is the same on every rank; empty where that is not known."""
        return models_of(self.rank, self.signature)

    @property
    def place(self) -> str:
        """`all_reduce (train.py:88)`, `barrier (utils.py:7, called from train.py:88)`."""
        return f"{self.signature.op} ({self.where})" if self.where else self.signature.op

    @property
    def where(self) -> str:
        """The line of the call and, where that is in a helper, the line that called it; empty where
        it has none."""
        here, caller = self.location, self.caller
        if here is None or caller is None:
            return str(here or "")
        by = f":{caller.line}" if caller.file == here.file else str(caller)
        return f"{here}, called from {by}"


@dataclass
class Segment:
    """The same calls `repeat` times, from number `first` on.

    Attributes:
        whats: a number for each distinct call; equal numbers on two ranks are equal calls.
        tokens: a number for each call and the text of its lines, `UNKNOWN` where that may differ
            between ranks; places: a number for each call and its lines, likewise.
        codes: signature and site of each call.
        step: optimizer steps taken before the first; every: steps from one repetition to the next.
    """

    first: int
    whats: tuple[int, ...]
    tokens: tuple[int, ...]
    places: tuple[int, ...]
    codes: tuple[tuple[int, int], ...]
    repeat: int = 1
    step: int = -1
    every: int = 0
    call: Call | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.whats) * self.repeat


@dataclass
class GroupCalls:
    """The calls of one rank in one group."""

    rank: Rank
    group: int
    segments: list[Segment] = field(default_factory=list)

    @property
    def issued(self) -> int:
        """How many calls the rank has begun in this group."""
        return self.segments[-1].end if self.segments else 0

    def number_at(self, index: int) -> int:
        """The number of the first segment that ends after a call."""
        return bisect_right(self.segments, index, key=lambda s: s.end)

    def segment_at(self, index: int) -> Segment | None:
        number = self.number_at(index)
        found = self.segments[number] if number < len(self.segments) else None
        return found if found is not None and found.first <= index else None


class CallLogs:
    """The calls of all ranks, by group and rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.logs: dict[GroupKey, dict[int, GroupCalls]] = {}
        self._whats: dict[What, int] = {}
        self._tokens: dict[tuple[What, Text], int] = {}
        self._places: dict[tuple[What, Spots, str], int] = {}
        self._known: dict[int, dict[tuple[int, int], CallRecord]] = {}
        self._steps: dict[int, list[tuple[int, int]]] = {}
        self._callers = callers(run)
        self._tells_models = not any(
            s.op == BACKWARD and s.model < 0 and not s.models
            for r in run.ranks.values()
            for s in r.of(Signature)
        )
        self._of_several = sites_of_several(run)
        self._joins = any(site.shadows for r in run.ranks.values() for site in r.of(CallSite))
        for rank in run.ranks.values():
            self._read(rank)

    def at(self, log: GroupCalls, index: int) -> CallRecord | None:
        """The call with a number; None where it is not on record."""
        made = self.recorded(log, index)
        if made is None or made.call is not None:
            return made
        return replace(made, call=_in_ring(log, index))

    def recorded(self, log: GroupCalls, index: int) -> CallRecord | None:
        """The call with a number, without its slot in the ring; None where it is not on record."""
        segment = log.segment_at(index)
        if segment is None:
            return None
        times, place = divmod(index - segment.first, len(segment.codes))
        if segment.whats[place] == UNKNOWN:
            return None
        known = self._made(log.rank, *segment.codes[place], log.group)
        taken = segment.step + times * segment.every
        step = self._step(log.rank, taken) if log.rank.steps else -1
        return replace(known, index=index, step=step, call=segment.call)

    def point_to_point(self, rank: Rank, call: Call) -> CallRecord:
        """The record of a point-to-point call, which has no number in its group."""
        known = self._made(rank, call.signature, call.site, call.group)
        return replace(known, step=call.step, call=call)

    def window(self, log: GroupCalls, first: int, count: int) -> Iterator[CallRecord]:
        """Up to `count` calls from number `first` on, until one is not on record."""
        for index in range(first, first + count):
            made = self.at(log, index)
            if made is None:
                return
            yield made

    def key(self, rank: Rank, group: int) -> GroupKey | None:
        """The key of a group of this rank; None where the rank is no member."""
        if group == NEW_GROUPS:
            return GroupKey("new_group", tuple(range(self.run.world_size)))
        ready = next((g for g in rank.of(GroupReady) if g.group == group and g.member), None)
        return GroupKey(ready.name, ready.ranks, ready.backend) if ready else None

    def steps_of(self, rank: Rank) -> int:
        """The optimizer steps of a rank, as reports count them."""
        known = self._taken(rank)
        return known[-1][1] if known else rank.steps

    def _step(self, rank: Rank, taken: int) -> int:
        """Steps as reports count them, after `taken` steps of all optimizers together."""
        known = self._taken(rank)
        own = known[min(bisect_left(known, (taken, 0)), len(known) - 1)][1] if known else taken
        return min(taken, own)

    def _taken(self, rank: Rank) -> list[tuple[int, int]]:
        if rank.rank not in self._steps:
            self._steps[rank.rank] = reported_by_total(rank)
        return self._steps[rank.rank]

    def _read(self, rank: Rank) -> None:
        blocks = {b.id: b.codes for b in rank.of(CallBlock)}
        by_group: dict[int, GroupCalls] = {}
        for run in rank.of(CallRun):
            codes = blocks.get(run.block)
            if codes:
                self._add(by_group, rank, run, codes)
        for call in rank.ring.calls if rank.ring else ():
            if call.index < 0 or call.state is State.VOID:
                continue
            log = by_group.setdefault(call.group, GroupCalls(rank, call.group))
            if call.index >= log.issued:
                self._append(log, call.index, ((call.signature, call.site),), 1, call.step, 0, call)
        for group, log in by_group.items():
            key = self.key(rank, group)
            if key is not None:
                self.logs.setdefault(key, {})[rank.rank] = log

    def _add(
        self, logs: dict[int, GroupCalls], rank: Rank, run: CallRun, codes: tuple[int, ...]
    ) -> None:
        log = logs.setdefault(run.group, GroupCalls(rank, run.group))
        pairs = tuple(zip(codes[::2], codes[1::2], strict=False))
        last = log.segments[-1] if log.segments else None
        if (
            last
            and (last.codes, last.end, last.every) == (pairs, run.first, run.every)
            and last.step + last.repeat * last.every == run.step
        ):
            last.repeat += run.repeat
            return
        self._append(log, run.first, pairs, run.repeat, run.step, run.every, None)

    def _append(
        self,
        log: GroupCalls,
        first: int,
        codes: tuple[tuple[int, int], ...],
        repeat: int,
        step: int,
        every: int,
        call: Call | None,
    ) -> None:
        made = [self._made(log.rank, signature, site, log.group) for signature, site in codes]
        whats = tuple(
            UNKNOWN
            if m.signature.id == UNKNOWN
            else self._whats.setdefault(m.what, len(self._whats))
            for m in made
        )
        tokens = tuple(
            UNKNOWN
            if what == UNKNOWN or not _by_lines(m)
            else self._tokens.setdefault((m.what, _text(m)), len(self._tokens))
            for m, what in zip(made, whats, strict=True)
        )
        places = tuple(
            UNKNOWN
            if token == UNKNOWN or m.in_join
            else self._places.setdefault((m.what, m.spots, m.key), len(self._places))
            for m, token in zip(made, tokens, strict=True)
        )
        log.segments.append(Segment(first, whats, tokens, places, codes, repeat, step, every, call))

    def _made(self, rank: Rank, signature: int, site: int, group: int) -> CallRecord:
        """The call behind the numbers of a signature and a site; its own number is left at -1."""
        known = self._known.setdefault(rank.rank, {})
        if (signature, site) not in known:
            meant = next((s for s in rank.of(Signature) if s.id == signature), None)
            where = next((s for s in rank.of(CallSite) if s.id == site), None)
            meant = meant or Signature(at=0, id=UNKNOWN, op="unknown call")
            text = lines(rank, where)
            several = meant.models or (rank.rank, meant.op, site) in self._of_several
            models = models_of(rank, meant) if several and self._tells_models else {}
            known[signature, site] = CallRecord(
                rank,
                -1,
                meant,
                where,
                -1,
                _what(meant, self.key(rank, group), tuple(models)),
                text,
                helpers=helpers(rank, where, self._callers),
                spots=tuple((spot.file, spot.line) for spot in _spots(rank, where)),
                key=where.key if where and meant.op not in EMPTY else "",
                joins=self._joins,
            )
        return known[signature, site]


@lru_cache(maxsize=1)
def call_logs(run: Run) -> CallLogs:
    """The calls of a run, read once for all checks."""
    return CallLogs(run)


def first_difference(
    a: GroupCalls, b: GroupCalls, part: Callable[[Segment], tuple[int, ...]], start: int = 0
) -> int | None:
    """The first call from `start` on in which two ranks differ, as far as both are on record.

    Args:
        part: which numbers of a segment to compare.
    """
    xs, ys = _rest(a, part, start), _rest(b, part, start)
    x, y = next(xs, None), next(ys, None)
    while x is not None and y is not None:
        if x.first == y.first and x.values == y.values:
            times = min(x.repeat, y.repeat)
            x, y = x.past(times) or next(xs, None), y.past(times) or next(ys, None)
            continue
        for index in range(max(x.first, y.first, start), min(x.end, y.end)):
            here, there = x.values[index - x.first], y.values[index - y.first]
            if here != there and UNKNOWN not in (here, there):
                return index
        end_x, end_y = x.end, y.end
        if end_x <= end_y:
            x = x.past(1) or next(xs, None)
        if end_y <= end_x:
            y = y.past(1) or next(ys, None)
    return None


@dataclass(frozen=True)
class _Part:
    """The same values `repeat` times; `end` is that of the first time."""

    first: int
    values: tuple[int, ...]
    repeat: int

    @property
    def end(self) -> int:
        return self.first + len(self.values)

    def past(self, times: int) -> _Part | None:
        """The rest after a number of repetitions; None where nothing is left."""
        if self.repeat <= times:
            return None
        return _Part(self.first + times * len(self.values), self.values, self.repeat - times)


def _rest(
    log: GroupCalls, part: Callable[[Segment], tuple[int, ...]], start: int
) -> Iterator[_Part]:
    """The values of a log from the repetition on that contains call `start`."""
    for number in range(log.number_at(start), len(log.segments)):
        segment = log.segments[number]
        values = part(segment)
        whole = _Part(segment.first, values, segment.repeat)
        yield whole.past(max(0, start - segment.first) // len(values)) or whole


def _by_lines(made: CallRecord) -> bool:
    """Whether the lines of a call tell which one it is: a callback of a communication hook has none
    where a thread of the backend runs it, and the program may answer calls of its own in `Join`."""
    answers = made.site is not None and made.site.shadows and not made.site.internal
    return bool(made.text) and not answers


def _text(made: CallRecord) -> Text:
    """The lines of a call; for those that `Join` answers on ranks that are done, none."""
    return () if made.in_join else made.text


def _in_ring(log: GroupCalls, index: int) -> Call | None:
    ring = log.rank.ring
    if ring is None:
        return None
    return next(
        (
            c
            for c in reversed(ring.calls)
            if c.group == log.group and c.index == index and c.state is not State.VOID
        ),
        None,
    )


def _what(signature: Signature, key: GroupKey | None, models: tuple[int, ...]) -> What:
    numel = signature.numel
    if (
        signature.op in ("all_gather", "gather", "scatter")
        and key is not None
        and "gloo" not in key.backend
    ):
        numel = -1  # NCCL takes tensors of different sizes
    return (
        (signature.op, signature.rebuilds),
        numel,
        signature.dtype,
        signature.device,
        signature.reduce_op,
        signature.root,
        signature.ranks,
        models,
    )


def lines(rank: Rank, site: CallSite | None) -> Text:
    """The source lines that led to a call, innermost first."""
    found = _spots(rank, site)
    return tuple(spot.source.strip() or f"{spot.file}:{spot.line}" for spot in found)


def _spots(rank: Rank, site: CallSite | None) -> list[Location]:
    found = (rank.location(place.site) for place in (site.places if site else ()))
    return [spot for spot in found if spot is not None]
