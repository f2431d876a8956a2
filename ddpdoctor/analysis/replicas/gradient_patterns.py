"""How the gradients of each step were computed and synchronised (recorded when it changes)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import SyncPattern
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
    mine = [
        e
        for e in member.rank.of(SyncPattern)
        if (e.model, e.optimizer) == (member.model, member.optimizer)
    ]
    for event, after in zip(mine, [*mine, None][1:], strict=True):
        last = after.step - 1 if after else max(member.last_step, event.step)
        if last >= event.step:
            yield Span(event, event.step, last)
