"""What parted the ranks: a branch that only some take, or an exception that only some had."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...events import CallSite, Place, Statement
from ...run import Location, Rank, ranks_text
from ..calls.call_logs import CallRecord, lines
from ..control_flow.branches import avoided, branch, condition, is_inside, passed, same_lines
from ..control_flow.jumps import line_in, loops_around
from .divergence import CallDivergence


def entered(divergence: CallDivergence) -> tuple[Place, Statement] | None:
    """The branch that only the ranks at fault took: its text says so, or the others are past it in
    the same step and never made that call."""
    place = divergence.place
    said = condition(place)
    found = said or branch(place)
    if found is None or around_all(divergence, *found):
        return None
    if said is not None:
        return said
    rest = [m for r, m in divergence.made.items() if r not in divergence.culprits]
    past = all(avoided(place, m) or _is_round(divergence, m, *found) for m in rest)
    return found if rest and past else None


def by_their_rank(divergence: CallDivergence) -> bool:
    """Whether a condition on the rank leads the ranks at fault to a call that no other rank makes
    at any time: whatever the others may have left, they do not come to it."""
    said = condition(divergence.place)
    if said is None or around_all(divergence, *said):
        return False
    rest = [m for r, m in divergence.made.items() if r not in divergence.culprits]
    return bool(rest) and not any(_makes(m.rank, divergence.place.spots) for m in rest)


def opposed(divergence: CallDivergence, place: Place, statement: Statement) -> bool:
    """Whether a rank that is not at fault is in another branch of the same `if`."""
    spot = divergence.place.rank.location(place.site)
    return spot is not None and any(
        enclosing.line != statement.line
        and (enclosing.opener or enclosing.line) == (statement.opener or statement.line)
        and (at := made.rank.location(there.site)) is not None
        and at.file == spot.file
        for number, made in divergence.made.items()
        if number not in divergence.culprits
        for there in (made.site.places if made.site else ())
        for enclosing in there.inside
    )


def around_all(divergence: CallDivergence, place: Place, statement: Statement) -> bool:
    """Whether every rank is inside of a statement around the call that is pointed at: it parts
    nobody."""
    spot = divergence.place.rank.location(place.site)
    return spot is not None and all(
        is_inside(made.rank, made.site, spot.file, statement.line)
        for made in divergence.made.values()
    )


def _is_round(
    divergence: CallDivergence, made: CallRecord, place: Place, statement: Statement
) -> bool:
    """Whether a rank is in the next round of a loop around that branch, without the call in it: all
    were in one call above it, and this rank is in that one, or above it, again."""
    call = divergence.place
    last = next((m for m in divergence.before if m.rank.rank == made.rank.rank), None)
    mine = next((m for m in divergence.before if m.rank.rank == call.rank.rank), None)
    if last is None or mine is None or not same_lines(last, mine) or last.step != mine.step:
        return False
    if any(lines(made.rank, site) == call.text for site in made.rank.of(CallSite)):
        return False
    spot = call.rank.location(place.site)
    for key, _, depth, loop in loops_around(call.rank, call.site):
        inside = call.site.places[depth].inside if call.site else ()
        if statement not in inside or loop not in inside or spot is None:
            continue
        before, here = (line_in(m.rank, m.site, key) for m in (last, made))
        if before is not None and here is not None and here <= before < statement.line:
            return True
    return False


def alone(divergence: CallDivergence) -> CallDivergence:
    """The same as a call too many, where only the ranks at fault entered the branch around it and
    no other makes it: that calls of their own read like it, from lines elsewhere, is no other
    order."""
    found = entered(divergence) if divergence.shifted and not divergence.extra else None
    if found is None or opposed(divergence, *found):
        return divergence
    rest = [m for r, m in divergence.made.items() if r not in divergence.culprits]
    here = divergence.place.spots
    there = any(_makes(m.rank, here) for m in rest)
    return divergence if there else replace(divergence, extra=True)


def _makes(rank: Rank, spots: tuple[tuple[str, int], ...]) -> bool:
    """Whether a rank makes a call on these lines at any time."""
    return any(
        tuple((at.file, at.line) for p in site.places if (at := rank.location(p.site))) == spots
        for site in rank.of(CallSite)
    )


@dataclass(frozen=True)
class SwallowedException:
    """A call that some ranks are past without having made it, by a handler and nothing else.

    Attributes:
        made: the call, of one that makes it.
    """

    ranks: tuple[int, ...]
    made: CallRecord
    head: Location

    @property
    def cause(self) -> str:
        return (
            f"{ranks_text(self.ranks)} went on past that call without it: of the statements around "
            f"it only `{self.head.source}` ({self.head}) leads there, after an exception"
        )

    @property
    def fix(self) -> str:
        return (
            f"make no collective inside of a `try` that goes on after an exception: move "
            f"{self.made.signature.op} out of it, or let `{self.head.source}` raise it again, so "
            "that a rank that fails ends"
        )


def swallowed(divergence: CallDivergence) -> SwallowedException | None:
    """Who left a call out by an exception that was caught, where the lines leave no other way:
    those ranks are further down in the function of the `try` around the others' call."""
    if divergence.shifted or "op" not in divergence.differs or len(divergence.made) < 2:
        return None
    for made in divergence.made.values():
        rest = {r: m for r, m in divergence.made.items() if m.text != made.text}
        stay = [m for r, m in divergence.made.items() if r not in rest]
        if not rest or not all(same_lines(m, made) for m in stay):
            continue
        tried, head = _handler(made) or (None, None)
        if tried and head and all(passed(m, made, tried) for m in rest.values()):
            return SwallowedException(tuple(sorted(rest)), made, head)
    return None


def _handler(made: CallRecord) -> tuple[Place, Location] | None:
    """The line of a `try` that led to a call, and its handler, where no other statement in the
    functions from there down to the call can lead around that."""
    for place in made.site.places if made.site else ():
        spot = made.rank.location(place.site)
        for around in place.inside if spot else ():
            if spot and around.text.startswith("try:") and around.ways:
                way = around.ways[0]
                return place, Location(spot.file, way.line, spot.function, way.text)
            if not around.text.startswith(("with ", "try:")):
                return None
    return None
