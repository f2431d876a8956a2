"""Conditions that hold on some ranks only, around a line of the source or the calls that lead to
it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...events import Place, Statement
from ...report.findings import Related
from ...run import Location, Rank
from .rank_conditions import is_plain, on_rank, part_on_rank, unquoted

_WITH_NONE = re.compile(r"\bis (?:not )?None\b")
"""What only some ranks have (a writer of logs) is None on the others."""


@dataclass(frozen=True)
class Guard:
    """A condition under which a line runs on some ranks only.

    Attributes:
        location: the line of its head.
        guarded: the line under it: the one that was asked for, or a call that leads there.
        direct: whether it is the one that was asked for.
    """

    head: Statement
    location: Location
    guarded: Location
    direct: bool

    @property
    def text(self) -> str:
        """`under `if rank == 0:``, `after `if rank: return``."""
        return f"{'after' if self.head.kind == 'past' else 'under'} `{self.head.label}`"

    @property
    def related(self) -> Related:
        """The line of the condition, for a finding."""
        return Related("does not hold on every rank", self.location)

    def fix(self, *, at_the_line: bool = True, keep: bool = False) -> str:
        """How to run the line on every rank.

        Args:
            at_the_line: the finding points at the line that was asked for.
            keep: what else the condition asks for has to hold on every rank, as it is about what
                the line uses (a checkpoint, say).
        """
        this = self.direct and at_the_line
        line = "this line" if this else f"`{self.guarded.source.strip()}`"
        run = f"run {line} on every rank"
        if (found := part_on_rank(self.head)) and (keep or is_plain(found[1])):
            part, rest = found
            way = f"past `if {rest}:`" if self.head.kind == "past" else f"under `if {rest}:`"
            return f"{run}: put it {way}, without `{part}`"
        move = "before" if self.head.kind == "past" else "out of"
        return f"{run}: move it {move} `{self.head.label}`"


def guard(rank: Rank, places: tuple[Place, ...], *, lacks: bool = True) -> Guard | None:
    """The condition nearest to a line that asks for the rank or for what some ranks lack; None
    where there is none, so that every rank may run it.

    Args:
        places: the line and the calls that lead to it, innermost first.
        lacks: a test for None counts: it was seen that some ranks do not do what the line does.
    """
    for number, place in enumerate(places):
        heads = on_rank(place.inside)
        heads += [s for s in place.inside if lacks and _asks_for_none(s)]
        guarded = rank.location(place.site)
        if heads and guarded is not None:
            head = heads[0]
            line = Location(guarded.file, head.line, guarded.function, head.text)
            return Guard(head, line, guarded, direct=number == 0)
    return None


def _asks_for_none(head: Statement) -> bool:
    return _WITH_NONE.search(unquoted(head.test)) is not None
