"""Where the records of ranks that should do the same differ, the earliest difference first."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from ...events import (
    Event,
    ExceptionRaised,
    GroupDestroyed,
    GroupReady,
    LoaderSeen,
    RankExiting,
    RankStarted,
    Wrapped,
)
from ...events.base import Part
from ...run import Location, Rank, Run, listed, ranks_text
from .compared import COMPARED, Recorded
from .records import same_value

SHOWN = 60
"""Characters of a value."""

ABSENT = None
"""Stands for what a rank did not do."""

OWN_VARIABLES = re.compile(
    r"(environment|changed)\..*"
    r"(RANK|PROCID|LOCALID|NODEID|TASK|HOSTNAME|NODENAME|VISIBLE_DEVICES|GTIDS|IPADDR|ERROR_FILE|TEMP_FILE"
    r"|PMIX?_)"
)
"""Environment variables that launchers set for each process, or each node, by itself."""

OWN_OPTION = re.compile(r"--?((local|global|node|machine|dist)[-_])?rank(=.*)?")
"""An option by which a launcher tells a process its rank: `--local-rank=0`."""

ENDINGS = (ExceptionRaised, GroupDestroyed, RankExiting)
"""How a rank ended is what a finding is about, and no reason for it."""

Key = tuple[object, ...]
Records = dict[int, Event]
"""By moment."""


@dataclass(frozen=True)
class Difference:
    """The first moment at which ranks recorded different things about one thing.

    Attributes:
        kind, what: the event, and how a report calls it.
        key: which one it is (`{"optimizer": 0}`).
        field: what of it differs, with its place: `groups[0].lr`, `environment.MASTER_PORT`; empty
            where some ranks did it and others did not.
        values: by rank; `ABSENT` for ranks that did not do it, or have no such value.
        moment: the number of the step, call, ...: see `Compared.moment`; else which time it was.
        at: when it was first recorded, on the run's clock.
        lines: by rank, the line on record with it.
    """

    kind: type[Event]
    what: str
    key: Mapping[str, object]
    field: str
    values: Mapping[int, object]
    moment: int
    at: float
    lines: Mapping[int, Location]

    @property
    def text(self) -> str:
        """`options groups[0].lr is 0.1 on ranks 0-2, 0.2 on rank 3 (train.py:22)`, `clipping on
        rank 0 only (train.py:30)`."""
        spots = listed(list(dict.fromkeys(map(str, self.lines.values()))))
        where = f" ({spots})" if spots else ""
        if not self.field:
            done = [n for n, value in self.values.items() if value is not ABSENT]
            return f"{self.what} on {ranks_text(done)} only{where}"
        by_value: dict[str, list[int]] = {}
        for number, value in self.values.items():
            shown = "nothing" if value is ABSENT else str(value)
            by_value.setdefault(shown[:SHOWN], []).append(number)
        values = ", ".join(f"{value} on {ranks_text(on)}" for value, on in by_value.items())
        if self.field.endswith("site"):
            return f"{self.what} at {values}"
        named = COMPARED[self.kind].words.get(self.field, f"{self.what} {self.field}")
        return f"{named} is {values}{where}"


def differences(
    run: Run, ranks: Iterable[int] = (), *, before: float = inf, usual: bool = False
) -> list[Difference]:
    """What these ranks recorded differently before a time, the earliest first; of each thing only
    the first time that it differs.

    Args:
        ranks: that should do the same; all ranks of the run if left out.
        before: seconds on the run's clock (`Rank.wall`).
        usual: include what differs between ranks of a correct program, too.
    """
    members = [run.ranks[n] for n in ranks or run.ranks if n in run.ranks]
    return differences_among(members, before=before, usual=usual)


def differences_among(
    members: Collection[Rank], *, before: float = inf, usual: bool = False
) -> list[Difference]:
    """What these ranks recorded differently: see `differences`."""
    last = {rank.rank: _last(rank) for rank in members}
    found = [
        difference
        for kind, row in COMPARED.items()
        if usual or not row.usual
        for difference in _of_kind(members, kind, last, before)
    ]
    return sorted(found, key=lambda d: d.at)


def preceding(members: Collection[Rank], before: float) -> list[Difference]:
    """What may be the reason for what these ranks did differently from that time on: the earliest
    difference first, but for how they ended."""
    found = differences_among(members, before=before)
    return [difference for difference in found if difference.kind not in ENDINGS]


def _of_kind(
    members: Collection[Rank], kind: type[Event], last: Mapping[int, float], before: float
) -> Iterator[Difference]:
    """What ranks recorded differently in events of one kind."""
    tables = _by_key(members, kind)
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        sharing = _sharing(members, kind, key)
        records = {r.rank: tables[r.rank].get(key, {}) for r in sharing}
        yield from _of_one(sharing, kind, key, records, last, before)


def _sharing(members: Collection[Rank], kind: type[Event], key: Key) -> Collection[Rank]:
    """The ranks that share what a key is about: a model that some ranks wrap in a group of theirs
    is nothing to the others."""
    names = COMPARED[kind].key
    if "model" not in names:
        return members
    number = key[names.index("model")]
    groups = [
        {g.group: g.ranks for g in rank.of(GroupReady)}.get(wrapped.group, ())
        for rank in members
        for wrapped in rank.of(Wrapped)
        if wrapped.model == number
    ]
    ranks = {r for group in groups for r in group}
    found = [rank for rank in members if rank.rank in ranks]
    return found if len(found) > 1 else members


def _of_one(
    members: Collection[Rank],
    kind: type[Event],
    key: Key,
    records: Mapping[int, Records],
    last: Mapping[int, float],
    before: float,
) -> Iterator[Difference]:
    """The first difference in each field of one thing.

    Args:
        last: by rank, when it was last seen to go on: it was there until then, and did not do what
            it has no record of.
    """
    row = COMPARED[kind]
    common = (kind, row.what, dict(zip(row.key, key, strict=True)))
    different: set[str] = set()
    held: dict[int, Event] = {}
    for moment in sorted({m for mine in records.values() for m in mine}):
        fresh = {r.rank: records[r.rank][moment] for r in members if moment in records[r.rank]}
        at = min(r.wall(fresh[r.rank].at) for r in members if r.rank in fresh)
        if at >= before:
            return
        held |= fresh
        now = held if row.recorded is Recorded.CHANGES else fresh
        there = [r for r in members if r.rank in fresh or last[r.rank] > at]
        compared = [r for r in there if r.rank in now]
        absent = [
            r
            for r in there
            if r.rank not in now and (row.recorded is not Recorded.SAMPLED or not records[r.rank])
        ]
        if absent:
            done = {r.rank: r.rank in now or ABSENT for r in (*compared, *absent)}
            yield Difference(*common, "", done, moment, at, _lines(compared, now))
            return
        for field in row.fields:
            if field not in different and (first := _first(compared, now, field)) is not None:
                different.add(field)
                yield Difference(*common, *first, moment, at, _lines(compared, now))


def _last(rank: Rank) -> float:
    """When a rank last recorded anything or began a call, on the run's clock. Of one that failed
    only what the program did counts: it may have been about to do what the others did."""
    failed = rank.exception is not None
    calls = rank.ring.calls if rank.ring is not None and not failed else ()
    called = max((rank.wall(call.began) for call in calls), default=0.0)
    done = (e for e in rank if not failed or (type(e) in COMPARED and not isinstance(e, ENDINGS)))
    return max([called, *(rank.wall(e.at) for e in done)])


def _by_key(members: Collection[Rank], kind: type[Event]) -> dict[int, dict[Key, Records]]:
    """By rank, its records by what they are about and by moment. Names that only some ranks know
    are taken without the rank's own number: `state-0.pt` and `state-1.pt` belong together."""
    row = COMPARED[kind]
    events = {
        rank.rank: [
            (tuple(_value(rank, e, name) for name in row.key), e)
            for e in rank.of(kind)
            if row.when is None or row.when(e)
        ]
        for rank in members
    }
    common = set.intersection(*({key for key, _ in mine} for mine in events.values()))
    tables: dict[int, dict[Key, Records]] = {}
    for rank in members:
        table = tables.setdefault(rank.rank, {})
        for key, event in events[rank.rank]:
            mine = table.setdefault(key if key in common else _neutral(rank, key), {})
            mine.setdefault(getattr(event, row.moment) if row.moment else len(mine), event)
    return tables


def _lines(ranks: Iterable[Rank], now: Mapping[int, Event]) -> dict[int, Location]:
    """The known lines of records."""
    spots = ((r.rank, r.location(getattr(now[r.rank], "site", -1))) for r in ranks)
    return {number: spot for number, spot in spots if spot is not None}


def _value(rank: Rank, event: Event, field: str) -> Any:
    """The value of a field; of a field that holds a line, the line: its number is the rank's."""
    value = getattr(event, field)
    if isinstance(event, RankStarted) and field == "argv" and value:
        # Nodes may have folders of their own: `script_digest` tells other scripts apart.
        options = pairwise(value)
        others = (given for last, given in options if not _tells_rank(last, given))
        return (posixpath.basename(value[0]), *others)
    if field == "loader":
        return _loader(rank, value)
    return str(rank.location(value) or "") if field.endswith("site") else value


def _loader(rank: Rank, number: int) -> object:
    """Which loader a rank means by a number: it counts those that it iterates, in that order, and
    not every rank need iterate the same ones first."""
    seen = next((e for e in rank.of(LoaderSeen) if e.loader == number), None)
    spot = rank.location(seen.site) if seen is not None else None
    return number if seen is None or spot is None else (str(spot), seen.made)


def _tells_rank(last: str, given: str) -> bool:
    """Whether an argument, after the last one, is the rank that the launcher gave."""
    return bool(OWN_OPTION.fullmatch(given) or (OWN_OPTION.fullmatch(last) and "=" not in last))


def _first(
    ranks: list[Rank], now: Mapping[int, Event], field: str
) -> tuple[str, dict[int, object]] | None:
    """The first part of a field that differs, with its value on every rank."""
    first, *others = (_value(r, now[r.rank], field) for r in ranks)
    if all(other == first for other in others):
        return None  # the usual case, and the fast one
    leaves = {r.rank: dict(_leaves(field, _value(r, now[r.rank], field))) for r in ranks}
    for place in dict.fromkeys(place for mine in leaves.values() for place in mine):
        values = {n: mine.get(place, ABSENT) for n, mine in leaves.items()}
        unknown = field.endswith("site") and "" in values.values()
        if not (unknown or OWN_VARIABLES.match(place) or _same(ranks, values)):
            return place, values
    return None


def _leaves(place: str, value: Any) -> Iterator[tuple[str, object]]:
    """The parts of a value, each with its place in it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{place}.{name}", inner)
    elif isinstance(value, tuple) and any(isinstance(v, (Mapping, Part)) for v in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{place}[{index}]", inner)
    elif isinstance(value, Part):
        yield place, getattr(value, "look", value)
    else:
        yield place, value


def _same(ranks: list[Rank], values: Mapping[int, object]) -> bool:
    """Whether values are equal, or are but for the rank's own number in them."""
    first, *others = values.values()
    if all(same_value(first, other) for other in others):
        return True
    own = [_neutral(rank, values[rank.rank]) for rank in ranks]
    return all(value == own[0] for value in own)


def _neutral(rank: Rank, value: Any) -> Any:
    """Text, or texts, with the rank's own numbers taken out."""
    if isinstance(value, tuple):
        return tuple(_neutral(rank, inner) for inner in value)
    if not isinstance(value, str):
        return value
    mine = {rank.rank, rank.started.local_rank if rank.started else rank.rank}
    return re.sub(r"\d+", lambda number: "<rank>" if int(number[0]) in mine else number[0], value)
