"""Loops that some ranks have left while others are still in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.events import CALLERS, CallSite, EpochBegan, EpochEnded
from ddpdoctor.findings import Location
from ddpdoctor.run import Rank

from ._log import Made
from ._mismatch import Parting

Key = tuple[str, int, str]
"""File, line and function of a loop's head."""


@dataclass(frozen=True)
class Left:
    """A loop that some have left.

    Attributes:
        ranks: who left it.
        uneven: it iterates a loader that ran dry on these, and not on the others.
    """

    ranks: list[int]
    loop: Location
    uneven: bool


def left_loop(parting: Parting) -> Left | None:
    """The loop that ranks are still in and others have left, None where that is not clear.

    Of nested ones it is the loop over a loader that ran dry early, otherwise the outermost: whoever
    leaves that is out of the others, too.
    """
    inside: dict[Key, list[int]] = {}
    heads: dict[Key, Location] = {}
    for rank, made in parting.made.items():
        for key, head in _around(made):
            inside.setdefault(key, []).append(rank)
            heads[key] = head
    found = []
    for key, stay in inside.items():
        rest = [r for r in parting.made if r not in stay]
        if rest and all(_has_left(parting.made[r], key) for r in rest):
            uneven = _ran_dry(parting, heads[key], rest, stay)
            found.append(Left(rest, heads[key], uneven))
    return next((left for left in found if left.uneven), found[0] if found else None)


def _around(made: Made) -> Iterator[tuple[Key, Location]]:
    """The loops around a call, outermost first."""
    for place in reversed(made.site.places if made.site else ()):
        spot = made.rank.location(place.site)
        for around in reversed(place.inside) if spot else ():
            if spot and around.text.startswith(("for ", "while ")):
                head = Location(spot.file, around.line, spot.function, around.text)
                yield (spot.file, around.line, spot.function), head


def _has_left(made: Made, loop: Key) -> bool:
    """Whether a rank made calls in a loop before, and is known to be outside of it now."""
    places = made.site.places if made.site else ()
    spots = [made.rank.location(p.site) for p in places]
    here = any(s and (s.file, s.function) == (loop[0], loop[2]) for s in spots)
    if not here and len(places) >= CALLERS:
        return False  # it may be in the loop by a caller that is not on record
    return any(
        key == loop
        for site in made.rank.of(CallSite)
        for key, _ in _around(Made(made.rank, -1, made.signature, site, -1, (), ()))
    )


def _ran_dry(parting: Parting, loop: Location, left: list[int], stay: list[int]) -> bool:
    """Whether the loop's loader was over on the ranks that left, in the epoch that the others are
    in."""
    iterations = {r: _iterations(m.rank, loop) for r, m in parting.made.items()}
    number = {len(iterations[r]) - 1 for r in stay}
    if len(number) != 1 or -1 in number:
        return False
    (now,) = number
    return all(
        len(iterations[r]) > now and (end := iterations[r][now]) is not None and end.exhausted
        for r in left
    ) and all(iterations[r][now] is None for r in stay)


def _iterations(rank: Rank, loop: Location) -> list[EpochEnded | None]:
    """How each iteration over the loaders of a loop ended; None for one that has not."""
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    began = []
    for event in rank.of(EpochBegan):
        spot = rank.location(event.site)
        if spot is not None and (spot.file, spot.line) == (loop.file, loop.line):
            began.append(ends.get((event.loader, event.epoch)))
    return began
