"""Lines in helper functions that several other lines call."""

from __future__ import annotations

from itertools import pairwise

from ...events import CallSite
from ...run import Location, Rank, Run
from .rank_conditions import on_rank

Spot = tuple[str, int]
"""File and line."""


def callers(run: Run) -> dict[Spot, set[Spot]]:
    """For each line that led to a call on any rank: the lines that called it."""
    found: dict[Spot, set[Spot]] = {}
    for rank in run.ranks.values():
        for site in rank.of(CallSite):
            spots = [rank.location(place.site) for place in site.places]
            for here, caller in pairwise(spots):
                if here is not None and caller is not None:
                    found.setdefault(_spot(here), set()).add(_spot(caller))
    return found


def _spot(location: Location) -> Spot:
    return location.file, location.line


def helpers(rank: Rank, site: CallSite | None, callers: dict[Spot, set[Spot]]) -> int:
    """How many of the innermost lines of a call are in helpers.

    A helper is called from several lines or from a function in another file, or only passes on what
    it was given; its line is in no loop and under no condition on the rank there.
    """
    found = 0
    for depth, (place, outer) in enumerate(pairwise(site.places if site else ()), 1):
        here, caller = rank.location(place.site), rank.location(outer.site)
        if here is None or caller is None:
            break
        several = len(callers.get(_spot(here), ())) > 1
        elsewhere = caller.file != here.file and caller.function != "<module>"
        loops = any(around.is_loop for around in place.inside)
        if loops or on_rank(place.inside) or not (several or elsewhere or place.hands_on):
            break
        found = depth
    return found
