"""Loads of weights and of optimizer and scheduler state, and the ranks that make them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...events import Loaded
from ...report.findings import Condition, Finding, Related
from ...run import listed, ranks_do
from . import divergence_window
from .causes import Cause
from .divergence_window import EVER
from .group_findings import LOADED_ONLY_ON
from .replicas import Divergence, Replicas, loads

LOAD_ON_SOME = "load-on-some-ranks"
UNEQUAL_LOADS = "unequal-loads"

RULES = {
    LOAD_ON_SOME: "some ranks load weights or state that the others do not load",
    UNEQUAL_LOADS: "every rank loads weights or state, and what they load differs",
}

THINGS = {
    "weights": "weights after the wrap",
    "optimizer": "the optimizer's state",
    "scheduler": "the scheduler's state",
}
"""What may be loaded, and how a report calls it."""

LOADED_TOO = "also_loaded"
"""Evidence: what else the same ranks load, a list of keys of `THINGS`."""

Rows = dict[int, list[Loaded]]
"""By rank, in order."""


@dataclass(frozen=True)
class LoadedOnSome:
    """A load that only these ranks make, or that they make more often.

    Attributes:
        event: the last one, on the first of these ranks.
        others: whether the other ranks load something, too.
        here: whether they do so at the same line, less often.
    """

    ranks: tuple[int, ...]
    event: Loaded
    others: bool
    here: bool


def of_some(group: Replicas, what: str, until: float, steps: range = EVER) -> LoadedOnSome | None:
    """The last load before one of these steps that some ranks make and the others do not.

    Args:
        until: seconds on the run's clock.
    """
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


def loaded(group: Replicas, what: str, found: Divergence) -> Cause | None:
    """Some ranks loaded after the wrap and others did not, or not at the same line; None where no
    rank loaded."""
    until, steps = found.at, divergence_window.window(group, found)
    if (some := of_some(group, what, until, steps)) is not None:
        return by_some(group, what, some, until, steps)
    made = _by_step(group, what, _until(group, what, until, steps), steps)
    if not made:
        return None
    ranks = tuple(sorted(made))
    last = made[ranks[0]][-1]
    everybody = len(made) == len(group.members)
    return Cause(
        UNEQUAL_LOADS if everybody else LOAD_ON_SOME,
        text=f"every rank loads {THINGS[what]}, but not the same values"
        if everybody
        else f"{ranks_do(ranks, 'load')} {THINGS[what]}, the other ranks do not",
        fix=_fix(what, _under_way(group, ranks[0], last)),
        label="loads different values on different ranks" if everybody else ONLY_SOME,
        location=group.members[ranks[0]].rank.location(last.site),
        ranks=ranks,
        evidence={} if everybody else {LOADED_ONLY_ON: list(ranks)},
    )


ONLY_SOME = "only some ranks run this line"


def by_some(
    group: Replicas, what: str, some: LoadedOnSome, until: float, steps: range = EVER
) -> Cause:
    """The cause of what a load that only some ranks make has changed."""
    ranks = some.ranks
    also_loaded = {
        more: line
        for more in THINGS
        if more not in (what, "weights") and (line := _with_it(group, more, ranks, until, steps))
    }
    thing = listed([THINGS[each] for each in (what, *also_loaded)])
    under_way = _under_way(group, ranks[0], some.event)
    facts: dict[str, object] = {LOADED_ONLY_ON: list(ranks)}
    if also_loaded:
        facts[LOADED_TOO] = list(also_loaded)
    if some.here:
        text = f"{ranks_do(ranks, 'load')} {thing} more often than the other ranks"
        label = "some ranks run this line more often"
    else:
        place = " at this line" * some.others
        text = f"{ranks_do(ranks, 'load')} {thing}{place}, the other ranks do not"
        label = ONLY_SOME
    return Cause(
        LOAD_ON_SOME,
        text=text,
        fix="load the same on every rank"
        if some.others
        else _fix(what, under_way, bool(also_loaded)),
        label=label,
        location=group.members[ranks[0]].rank.location(some.event.site),
        ranks=ranks,
        related=tuple(also_loaded.values()),
        evidence=facts,
    )


def each_its_own(group: Replicas, until: float) -> bool:
    """Whether all ranks had loaded weights by `until`, none more often than another: they may
    evaluate several checkpoints at a time, one on each rank."""
    everybody = len(_until(group, "weights", until)) == len(group.members)
    return everybody and of_some(group, "weights", until) is None


def _of_the_same(one: Finding, other: Finding) -> bool:
    """Whether both findings follow from loads of the same ranks alone."""
    ranks = one.evidence.get(LOADED_ONLY_ON)
    return ranks is not None and ranks == other.evidence.get(LOADED_ONLY_ON)


SAME_LOADS = Condition("of what the same ranks alone loaded", _of_the_same)
OTHER_LOADS = Condition(
    "unless both come from what the same ranks alone loaded",
    lambda mine, other: not _of_the_same(mine, other),
)


def reloads(group: Replicas, what: str, after: float) -> bool:
    """Whether anything was loaded later: that explains copies that are equal again."""
    return any(
        group.members[n].rank.wall(e.at) > after
        for n, events in loads(group, what).items()
        for e in events
    )


def _under_way(group: Replicas, number: int, event: Loaded) -> bool:
    """Whether the training of these copies had begun when a rank made this load."""
    return divergence_window.own_step(group.members[number], event.step) > 0


def _fix(what: str, under_way: bool, also_loaded: bool = False) -> str:
    if what == "weights":
        fix = "load the same weights on every rank, or "
        if under_way:
            fix += "into a copy of the model if only one rank needs them (to evaluate)"
        else:
            fix += "before `DistributedDataParallel(...)`, which broadcasts rank 0's parameters"
        return fix + "; load the optimizer's state on every rank: DDP never copies it" * also_loaded
    return "load the same state on every rank: `torch.load(path, map_location=...)` everywhere"


def _with_it(
    group: Replicas, what: str, ranks: tuple[int, ...], until: float, steps: range
) -> Related | None:
    """The line at which the same ranks, and only they, also load `what`."""
    found = _until(group, what, until, steps)
    if tuple(sorted(found)) != ranks:
        return None
    spot = group.members[ranks[0]].rank.location(found[ranks[0]][-1].site)
    return Related(f"loads {THINGS[what]}", spot) if spot else None


def _until(group: Replicas, what: str, until: float, steps: range = EVER) -> Rows:
    """The loads up to a time, before one of these steps."""
    return {
        n: before
        for n, events in _before(group, what, steps).items()
        if (before := [e for e in events if group.members[n].rank.wall(e.at) <= until])
    }


def _before(group: Replicas, what: str, steps: range) -> Rows:
    """The loads before one of these steps."""
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
    """The loads up to the step of the last one in `found`: a slower rank may load later."""
    last = max((e.step for events in found.values() for e in events), default=-1)
    known = _before(group, what, steps)
    rows = {n: [e for e in events if e.step <= last] for n, events in known.items()}
    return {n: events for n, events in rows.items() if events}


def _extra(group: Replicas, rows: Rows) -> dict[str, tuple[int, ...]]:
    """By line, the ranks that load more often there than others, and more often in total."""
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
