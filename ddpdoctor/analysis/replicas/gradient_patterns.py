"""How the gradients of each step were computed and synchronised (recorded when it changes)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import SyncPattern
from ...run import Location
from ..rank_differences import series
from .replica import Member


@dataclass(frozen=True)
class Span:
    """Steps `first` to `last` of one rank that all followed one pattern."""

    pattern: SyncPattern
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


def patterns(member: Member) -> Iterator[Span]:
    """The spans of a model and optimizer on one rank, oldest first."""
    of = {"model": member.model, "optimizer": member.optimizer}
    for spans in series(member.rank, SyncPattern, "step", **of).spans(member.last_step):
        yield Span(*spans)


def backward_line(member: Member, step: int) -> Location | None:
    """The line of the backward before a step of a rank, as far as it is known."""
    known = [span.pattern for span in patterns(member) if span.first <= step]
    return member.rank.location(known[-1].backward_site) if known else None
