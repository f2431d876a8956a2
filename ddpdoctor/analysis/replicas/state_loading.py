"""What was loaded into copies, and on which ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...events import Loaded
from ...report.findings import Finding, Related
from ...run import ranks_do
from . import divergence_window
from .causes import Cause
from .divergence_window import EVER
from .replicas import Divergence, Replicas, loads

THINGS = {
    "weights": "weights after the wrap",
    "optimizer": "the optimizer's state",
    "scheduler": "the scheduler's state",
}

ONLY_ON = "loaded_only_on"
"""Name of the evidence which ranks alone load."""

Rows = dict[int, list[Loaded]]
"""By rank, in order."""


@dataclass(frozen=True)
class LoadedOnSome:
    """A load that only these ranks make.

    Attributes:
        event: the last one, on the first of them.
        others: the other ranks load something, too; here: at this very line, less often.
    """

    ranks: tuple[int, ...]
    event: Loaded
    others: bool
    here: bool


def of_some(group: Replicas, what: str, until: float, steps: range = EVER) -> LoadedOnSome | None:
    """The last load by then, before one of these steps, that some ranks make and the others do
    not."""
    found = _until(group, what, until, steps)
    rows = _by_step(group, what, found, steps)
    also = _extra(group, rows)
    lines = [line for line, ranks in _extra(group, found).items() if also.get(line) == ranks]
    if not lines:
        return None

    def last(line: str) -> Loaded:
        mine = also[line][0]
        return [e for e in rows[mine] if _line(group, mine, e) == line][-1]

    line = max(lines, key=lambda each: last(each).at)
    ranks = also[line]
    rest = [(n, e) for n, events in rows.items() if n not in ranks for e in events]
    return LoadedOnSome(
        ranks, last(line), bool(rest), any(_line(group, n, e) == line for n, e in rest)
    )


def loaded(group: Replicas, what: str, parted: Divergence) -> Cause | None:
    """Some ranks loaded after the wrap, others did not, or not from the same line."""
    until, steps = parted.at, divergence_window.parted(group, parted)
    if (some := of_some(group, what, until, steps)) is not None:
        return by_some(group, what, some, until, steps)
    found = _by_step(group, what, _until(group, what, until, steps), steps)
    if not found:
        return None
    ranks = tuple(sorted(found))
    spot = group.members[ranks[0]].rank.location(found[ranks[0]][-1].site)
    everybody = len(found) == len(group.members)
    return Cause(
        text=f"every rank loads {THINGS[what]}, and they are not the same"
        if everybody
        else f"{ranks_do(ranks, 'load')} {THINGS[what]}, the others do not",
        fix=_fix(what, _under_way(group, ranks[0], found[ranks[0]][-1])),
        label="what is loaded differs between ranks",
        location=spot,
        ranks=ranks,
        evidence={} if everybody else {ONLY_ON: list(ranks)},
    )


def by_some(
    group: Replicas, what: str, some: LoadedOnSome, until: float, steps: range = EVER
) -> Cause:
    """The load that only some ranks make, as the reason."""
    ranks = some.ranks
    beside = {
        more: line
        for more in THINGS
        if more not in (what, "weights") and (line := _with_it(group, more, ranks, until, steps))
    }
    thing = " and ".join(THINGS[each] for each in (what, *beside))
    under_way = _under_way(group, ranks[0], some.event)
    facts: dict[str, object] = {ONLY_ON: list(ranks)}
    if beside:
        facts["loaded_with_them"] = " and ".join(THINGS[more] for more in beside)
    if some.here:
        text = f"{ranks_do(ranks, 'load')} {thing} more often than the others"
        label = f"{ranks_do(ranks, 'come')} here more often"
    else:
        place = " at this line" * some.others
        text = f"{ranks_do(ranks, 'load')} {thing}{place}, the others do not"
        label = f"only {ranks_do(ranks, 'come')} here"
    return Cause(
        text,
        "load on every rank alike" if some.others else _fix(what, under_way, bool(beside)),
        label,
        group.members[ranks[0]].rank.location(some.event.site),
        ranks,
        related=tuple(beside.values()),
        evidence=facts,
    )


def each_its_own(group: Replicas, until: float) -> bool:
    """Whether all ranks had loaded weights by then, none more often: several checkpoints may be
    evaluated at a time, one on each rank."""
    everybody = len(_until(group, "weights", until)) == len(group.members)
    return everybody and of_some(group, "weights", until) is None


def of_the_same(one: Finding, other: Finding) -> bool:
    """Whether both come of what the same ranks, and only they, loaded."""
    ranks = one.evidence.get(ONLY_ON)
    return ranks is not None and ranks == other.evidence.get(ONLY_ON)


def reloads(group: Replicas, what: str, after: float) -> bool:
    """Whether anything was loaded later: copies that are equal again need no other reason."""
    return any(
        group.members[n].rank.wall(e.at) > after
        for n, events in loads(group, what).items()
        for e in events
    )


def _under_way(group: Replicas, number: int, event: Loaded) -> bool:
    """Whether a rank loads when the training of these copies has begun."""
    return divergence_window.own_step(group.members[number], event.step) > 0


def _fix(what: str, under_way: bool, beside: bool = False) -> str:
    if what == "weights":
        fix = "load on every rank, or "
        if under_way:
            fix += "into a copy of the model where one rank alone needs it (to evaluate, say)"
        else:
            fix += "before `DistributedDataParallel(...)`, which copies rank 0's"
        return fix + "; the optimizer's state on every rank: it is never copied" * beside
    return "load the same state on every rank: `torch.load(path, map_location=...)` everywhere"


def _with_it(
    group: Replicas, what: str, ranks: tuple[int, ...], until: float, steps: range
) -> Related | None:
    """Where the same ranks, and only they, load something besides."""
    found = _until(group, what, until, steps)
    if tuple(sorted(found)) != ranks:
        return None
    spot = group.members[ranks[0]].rank.location(found[ranks[0]][-1].site)
    return Related(f"and {THINGS[what]} here", spot) if spot else None


def _until(group: Replicas, what: str, until: float, steps: range = EVER) -> Rows:
    return {
        n: before
        for n, events in _before(group, what, steps).items()
        if (before := [e for e in events if group.members[n].rank.wall(e.at) <= until])
    }


def _before(group: Replicas, what: str, steps: range) -> Rows:
    """Those before one of these steps."""
    if steps == EVER:
        return loads(group, what)
    return {
        n: kept
        for n, events in loads(group, what).items()
        if (
            kept := [
                e for e in events if divergence_window.own_step(group.members[n], e.step) in steps
            ]
        )
    }


def _by_step(group: Replicas, what: str, found: Rows, steps: range) -> Rows:
    """The same as far as every rank had come by the last of them: one may have been slower."""
    last = max((e.step for events in found.values() for e in events), default=-1)
    known = _before(group, what, steps)
    rows = {n: [e for e in events if e.step <= last] for n, events in known.items()}
    return {n: events for n, events in rows.items() if events}


def _extra(group: Replicas, rows: Rows) -> dict[str, tuple[int, ...]]:
    """By line, the ranks that load more often there than others, and more often in all, too."""
    counts = {n: Counter(_line(group, n, e) for e in rows.get(n, ())) for n in group.members}
    found = {}
    for line in {line for lines in counts.values() for line in lines}:
        least = min(lines[line] for lines in counts.values())
        more = tuple(sorted(n for n, lines in counts.items() if lines[line] > least))
        rest = [lines.total() for n, lines in counts.items() if n not in more]
        if more and min(counts[n].total() for n in more) > max(rest):
            found[line] = more
    return found


def _line(group: Replicas, number: int, event: Loaded) -> str:
    return str(group.members[number].rank.location(event.site))
