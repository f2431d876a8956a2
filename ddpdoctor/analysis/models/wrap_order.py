"""Models that ranks wrap at one number, and that come from different lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...events import CallSite, Wrapped
from ...run import Location, Rank
from . import wrapped_models as models

COMPREHENSION = re.compile(r"\S\s+for\b.+\bin\b")
FIX_ORDER = (
    "wrap the models in the same order on every rank: `for name in sorted(names)`, not over a "
    "`set` or a directory listing"
)
FIX_CHOICE = (
    "let the same branches choose on every rank which model is built and wrapped next: what "
    "decides on it must not be a rank's own"
)


@dataclass(frozen=True)
class WrapOrder:
    """Two ranks' models of one number, made at different lines.

    Attributes:
        permuted: each rank wraps the other's model later on.
        loop: the line of the one loop in which both were wrapped, where there is one.
    """

    made: tuple[Location, Location]
    permuted: bool
    loop: Location | None

    @property
    def reordered(self) -> bool:
        return self.permuted or self.loop is not None

    @property
    def cause(self) -> str:
        if self.permuted:
            return (
                "the same models are wrapped in another order (a `set` of strings has another one "
                "in each process), and DDP knows them by their number alone: it sends and averages "
                "one model into the other"
            )
        if self.loop:
            return (
                "these are different models, made at different lines and wrapped in one loop: most "
                "likely it goes through them in another order on each rank (a `set` of strings has "
                "another one in each process), or what it builds depends on the rank"
            )
        return "these are different models, made at different lines: the ranks took other branches"

    @property
    def fix(self) -> str:
        return FIX_ORDER if self.reordered else FIX_CHOICE


def apart(one: tuple[Rank, Wrapped], other: tuple[Rank, Wrapped]) -> WrapOrder | None:
    here, there = _made(*one), _made(*other)
    if here is None or there is None or (here.file, here.line) == (there.file, there.line):
        return None
    permuted = _look(*one) in _later(*other) and _look(*other) in _later(*one)
    ours, theirs = _loop(*one), _loop(*other)
    return WrapOrder((here, there), permuted, ours if ours == theirs else None)


def _made(rank: Rank, wrapped: Wrapped) -> Location | None:
    """The line that made the wrapped module."""
    return rank.location(next((m.site for m in wrapped.modules if not m.name), -1))


def _look(rank: Rank, wrapped: Wrapped) -> object:
    made = _made(rank, wrapped)
    parameters = tuple(p.look for p in wrapped.parameters)
    return made and (wrapped.kind, made.file, made.line, parameters)


def _later(rank: Rank, wrapped: Wrapped) -> list[object]:
    """What the rank wrapped for the same group after that."""
    group = models.members(rank, wrapped)
    return [
        _look(rank, w)
        for w in rank.of(Wrapped)
        if w.model > wrapped.model and models.members(rank, w) == group
    ]


def _loop(rank: Rank, wrapped: Wrapped) -> Location | None:
    """The line that wraps, or the nearest that called it, which is in a loop over something."""
    calls = [c for c in rank.of(CallSite) if c.line == wrapped.site >= 0]
    for place in calls[0].places if calls else ():
        spot = rank.location(place.site)
        looped = any(e.text.startswith(("for ", "async for ")) for e in place.inside)
        if spot is not None and (looped or COMPREHENSION.search(spot.source)):
            return spot
    return None
