"""Which of some flight-recorder dumps are of one run: other jobs may have written into the same
folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..run import ranks_text
from ..storage.flight_dumps import Dump, Entry

STALE_S = 6 * 3600.0
"""Between the last calls in the dumps of one run, at most."""

APART_S = 5.0
"""Between calls that ranks finished together, at most: clocks of nodes differ."""

FEWEST = 2
"""Finished calls of a group that say when a rank took part in it. A rank that is late for the first
call finishes it with the others, before they make the second."""


def of_other_runs(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """The ranks whose dumps are not of the run that most, or else the latest, are of; and why."""
    groups: list[list[int]] = []
    for rank in sorted(dumps, key=lambda r: -dumps[r].last):
        for group in groups:
            if not any(_apart(dumps[rank], dumps[other]) for other in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    groups.sort(key=lambda g: -len(g))  # the latest of equal ones stays first
    kept = groups[0] if groups else []
    found = {}
    for rank in (r for group in groups[1:] for r in group):
        whys = {other: _apart(dumps[rank], dumps[other]) for other in kept}
        others = sorted(other for other, why in whys.items() if why)
        found[rank] = f"{whys[others[0]]} of {ranks_text(others)}: of another run"
    return found


def _apart(one: Dump, other: Dump) -> str:
    """Why two dumps cannot be of one run, to be followed by `of rank 1`; empty where they can."""
    if abs(one.last - other.last) > STALE_S and one.last and other.last:
        when = "before" if one.last < other.last else "after"
        return f"its last call was hours {when} that"
    sizes = [len(ranks) for dump in (one, other) if (ranks := dump.groups.get("0"))]
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        return f"its default group has {sizes[0]} ranks, not {sizes[1]} as that"
    for group in {e.group for e in one.entries} & {e.group for e in other.entries}:
        mine, theirs = _finished(one.entries, group), _finished(other.entries, group)
        both = mine.keys() & theirs.keys()
        if len(both) >= FEWEST:
            mine, theirs = ({n: at[n] for n in both} for at in (mine, theirs))
        if min(len(mine), len(theirs)) < FEWEST:
            continue
        if max(mine.values()) < min(theirs.values()) - APART_S:
            gap = min(theirs.values()) - max(mine.values())
            return f"its calls ended {gap:.0f} s before the first"
        if max(theirs.values()) < min(mine.values()) - APART_S:
            gap = min(mine.values()) - max(theirs.values())
            return f"its calls began {gap:.0f} s after the last"
    return ""


def _finished(entries: Iterable[Entry], group: str) -> dict[int, float]:
    """When the finished collectives of a group were issued, by their numbers."""
    mine = (e for e in entries if e.group == group and e.sequence >= 0)
    return {e.sequence: e.at for e in mine if e.done and e.at}
