"""Buffers that every rank updates from its own data and that DDP's broadcast then overwrites, so
that only the data of the group's first rank counts."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise

from ...events import BufferUpdates
from ...run import Location
from .replica import Member
from .replicas import Replicas

FEWEST = 4
"""Forwards whose updates must be known."""

APART = 0.01
"""How far the first rank and another must be apart, in sizes of the update: sums over the ranks in
another order differ by rounding."""

SHARE = 0.75
"""Of the updates, in which they are."""

GRADUAL = 1.0
"""The largest change of a moving average, in sizes of the buffer: values that are written anew in
each forward, and noise, change by more."""

REMEMBERED = 1.8
"""How much larger a change over three updates is than one over one, in squares: 1 for values that
do not depend on those before, 2.7 for a moving average that keeps nine tenths."""


@dataclass(frozen=True)
class Overwritten:
    """Buffers of one module.

    Attributes:
        names: of those that the ranks update differently.
        read: the line that uses the first of them that is used; `written` the first one that writes
            to any of its module.
        forwards: whose updates were compared; `apart` the median distance of another rank from the
            first, in sizes of the update.
        at: when it was seen first, on the clock of the first rank.
    """

    names: list[str]
    read: Location | None
    written: Location | None
    forwards: int
    apart: float
    at: float


Sketches = dict[int, tuple[float, ...]]
"""By forward."""


def overwritten(group: Replicas) -> Overwritten | None:
    """What a group's broadcasts overwrite; of several modules all buffers, and the lines of the
    first."""
    if group.left_out or not group.any.seen.broadcast:
        return None
    first = group.members.get(min(group.any.seen.ranks))
    others = [m for m in group.members.values() if m is not first]
    if first is None or not others:
        return None
    events = first.of(BufferUpdates)
    every = [_by_name(m) for m in (first, *others)]
    found: list[str] = []
    kept: dict[str, tuple[BufferUpdates, float, int]] = {}
    for event in events[:1]:
        for name, read in zip(event.names, event.read_sites, strict=True):
            rows = [table.get(name, {}) for table in every]
            distance, count = _apart(rows)
            if distance < APART:
                continue
            found.append(name)
            if read >= 0 and _averages(rows[0]):
                kept[name] = event, distance, count
    modules = {name.rpartition(".")[0] for name in kept}
    names = [name for name in found if name.rpartition(".")[0] in modules]
    if not names:
        return None
    main, (event, distance, count) = next(iter(kept.items()))
    module = main.rpartition(".")[0]
    places = (event.names.index(n) for n in names if n.rpartition(".")[0] == module)
    spots = (first.rank.location(event.write_sites[place]) for place in places)
    return Overwritten(
        names=names,
        read=first.rank.location(event.read_sites[event.names.index(main)]),
        written=min((s for s in spots if s is not None), key=lambda s: s.line, default=None),
        forwards=count,
        apart=distance,
        at=first.rank.wall(event.at),
    )


def _by_name(member: Member) -> dict[str, Sketches]:
    found: dict[str, Sketches] = {}
    for event in member.of(BufferUpdates):
        for name, row in zip(event.names, event.sketches, strict=True):
            found.setdefault(name, {})[event.forward] = row
    return found


def _apart(rows: list[Sketches]) -> tuple[float, int]:
    """How far the farthest rank is from the first after an update, in sizes of it (the median), and
    how many updates were compared; 0 where it is not so in most of them."""
    first, *others = rows
    common = set(first).intersection(*others)
    distances = []
    for before, after in pairwise(sorted(first)):
        if after - before == 1 and after in common:
            change = math.dist(first[before], first[after])
            farthest = max(math.dist(first[after], other[after]) for other in others)
            distances.append(farthest / change if change else 0.0)
    far = sum(d > APART for d in distances)
    if len(distances) < FEWEST or far < SHARE * len(distances):
        return 0.0, len(distances)
    return statistics.median(distances), len(distances)


def _averages(values: Sketches) -> bool:
    """Whether a buffer goes on from the value that it had, as a moving average does."""
    steps = [n for n in values if n + 1 in values]
    threes = [n for n in values if n + 3 in values]
    if not steps or len(threes) < FEWEST - 1:
        return False
    changes = [math.dist(values[n], values[n + 1]) for n in steps]
    sizes = [math.hypot(*values[n + 1]) for n in steps]
    if statistics.median(c / s if s else math.inf for c, s in zip(changes, sizes, strict=True)) > (
        GRADUAL
    ):
        return False
    one = statistics.fmean(math.dist(values[n], values[n + 1]) ** 2 for n in threes)
    three = statistics.fmean(math.dist(values[n], values[n + 3]) ** 2 for n in threes)
    return three > REMEMBERED * one > 0
