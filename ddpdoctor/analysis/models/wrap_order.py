"""Models that ranks wrap in the same position for one group, but that different lines made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...events import CallSite, Wrapped
from ...run import Location, Rank
from . import wrapped_models as models

COMPREHENSION = re.compile(r"\S\s+for\b.+\bin\b")
"""A line of source with a comprehension, which has no `for` statement around it."""

FIX_ORDER = (
    "wrap the models in the same order on every rank: `for name in sorted(names)`, not over a "
    "`set` or a directory listing"
)
FIX_CHOICE = (
    "take the same branches on every rank when the model is built and wrapped: the condition must "
    "not depend on the rank or its data"
)

SET_ORDER = "a `set` of strings has another order in each process"


@dataclass(frozen=True)
class WrapOrder:
    """Two ranks' models in the same position, made at different lines.

    Attributes:
        made: the lines that made them.
        permuted: each rank wraps the other's model later.
        loop: the line of the loop in which both were wrapped; None where there is none.
    """

    made: tuple[Location, Location]
    permuted: bool
    loop: Location | None

    @property
    def reordered(self) -> bool:
        """Whether the order of wraps differs, for certain or most likely."""
        return self.permuted or self.loop is not None

    @property
    def rule(self) -> str:
        """The rule of `model-mismatch`."""
        if self.permuted:
            return "wrap-order"
        return "wrap-loop" if self.loop else "different-branches"

    @property
    def cause(self) -> str:
        if self.permuted:
            return (
                f"the ranks wrap the same models in another order ({SET_ORDER}), and DDP matches "
                "models by position only, so it broadcasts and averages one into the other"
            )
        if self.loop:
            return (
                "these are different models, made at different lines and wrapped in one loop. Most "
                f"likely the loop has another order on each rank ({SET_ORDER}), or what it builds "
                "depends on the rank"
            )
        return "these are different models, made at different lines: the ranks took other branches"

    @property
    def fix(self) -> str:
        return FIX_ORDER if self.reordered else FIX_CHOICE


def wrap_order(one: tuple[Rank, Wrapped], other: tuple[Rank, Wrapped]) -> WrapOrder | None:
    """How two ranks' wraps in the same position differ; None where the same line made both models,
    or a line is unknown."""
    here, there = _made(*one), _made(*other)
    if here is None or there is None or (here.file, here.line) == (there.file, there.line):
        return None
    permuted = _identity(*one) in _later(*other) and _identity(*other) in _later(*one)
    ours, theirs = _loop(*one), _loop(*other)
    return WrapOrder((here, there), permuted, ours if ours == theirs else None)


def _made(rank: Rank, wrapped: Wrapped) -> Location | None:
    """The line that made the wrapped module."""
    return rank.location(next((m.site for m in wrapped.modules if not m.name), -1))


def _identity(rank: Rank, wrapped: Wrapped) -> object:
    """What identifies a model across ranks: class, line and parameters."""
    made = _made(rank, wrapped)
    parameters = tuple(p.look for p in wrapped.parameters)
    return made and (wrapped.kind, made.file, made.line, parameters)


def _later(rank: Rank, wrapped: Wrapped) -> list[object]:
    """What identifies the models that the rank wrapped for the same group after this one."""
    group = models.members(rank, wrapped)
    return [
        _identity(rank, w)
        for w in rank.of(Wrapped)
        if w.model > wrapped.model and models.members(rank, w) == group
    ]


def _loop(rank: Rank, wrapped: Wrapped) -> Location | None:
    """The line that wraps the model, or the nearest caller, that is within a `for` loop; None where
    there is none."""
    calls = [c for c in rank.of(CallSite) if c.line == wrapped.site >= 0]
    for place in calls[0].places if calls else ():
        spot = rank.location(place.site)
        looped = any(e.kind == "for" for e in place.inside)
        if spot is not None and (looped or COMPREHENSION.search(spot.source)):
            return spot
    return None
