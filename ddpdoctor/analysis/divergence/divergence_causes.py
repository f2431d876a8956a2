"""What made ranks diverge: a branch that only some take, or an exception that only some had."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...events import CallSite, Place, Statement
from ...run import Location, Rank, ranks_text
from ..calls.call_logs import CallRecord, lines
from ..control_flow.branches import avoided, branch, condition, is_inside, passed, same_lines
from ..control_flow.jumps import line_in, loops_around
from .divergence import CallDivergence


def entered(divergence: CallDivergence) -> tuple[Place, Statement] | None:
    """The branch that only the ranks at fault took: its condition is on the rank, or the others are
    past it in the same step and never made the call. None where no branch explains it."""
    place = divergence.call
    said = condition(place)
    found = said or branch(place)
    if found is None or around_all(divergence, *found):
        return None
    if said is not None:
        return said
    rest = [m for r, m in divergence.calls.items() if r not in divergence.culprits]
    past = all(avoided(place, m) or _is_round(divergence, m, *found) for m in rest)
    return found if rest and past else None


def by_their_rank(divergence: CallDivergence) -> bool:
    """Whether a condition on the rank leads to a call that only the ranks at fault ever make, so
    that the others have not left a loop around it."""
    said = condition(divergence.call)
    if said is None or around_all(divergence, *said):
        return False
    rest = [m for r, m in divergence.calls.items() if r not in divergence.culprits]
    return bool(rest) and not any(_makes(m.rank, divergence.call.spots) for m in rest)


def opposed(divergence: CallDivergence, place: Place, statement: Statement) -> bool:
    """Whether a rank that is not at fault is in another branch of the same `if`."""
    spot = divergence.call.rank.location(place.site)
    return spot is not None and any(
        enclosing.line != statement.line
        and (enclosing.opener or enclosing.line) == (statement.opener or statement.line)
        and (at := made.rank.location(there.site)) is not None
        and at.file == spot.file
        for number, made in divergence.calls.items()
        if number not in divergence.culprits
        for there in (made.site.places if made.site else ())
        for enclosing in there.inside
    )


def around_all(divergence: CallDivergence, place: Place, statement: Statement) -> bool:
    """Whether every rank is inside of a statement around the call, so that it explains nothing."""
    spot = divergence.call.rank.location(place.site)
    return spot is not None and all(
        is_inside(made.rank, made.site, spot.file, statement.line)
        for made in divergence.calls.values()
    )


def _is_round(
    divergence: CallDivergence, made: CallRecord, place: Place, statement: Statement
) -> bool:
    """Whether a rank is in the next round of a loop around a branch without having made the call in
    the branch: all ranks were in one call above it before, and this rank is there again, or above.
    """
    call = divergence.call
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


def as_extra_call(divergence: CallDivergence) -> CallDivergence:
    """A copy with an extra call in place of a different order, where only the ranks at fault
    entered the branch around the call: calls of the others that read the same are on other lines.
    """
    found = entered(divergence) if divergence.shifted and not divergence.extra else None
    if found is None or opposed(divergence, *found):
        return divergence
    rest = [m for r, m in divergence.calls.items() if r not in divergence.culprits]
    here = divergence.call.spots
    there = any(_makes(m.rank, here) for m in rest)
    return divergence if there else replace(divergence, extra=True)


def _makes(rank: Rank, spots: tuple[tuple[str, int], ...]) -> bool:
    """Whether a rank ever makes a call on these lines."""
    return any(
        tuple((at.file, at.line) for p in site.places if (at := rank.location(p.site))) == spots
        for site in rank.of(CallSite)
    )


@dataclass(frozen=True)
class SwallowedException:
    """A call that some ranks skipped, where only an exception handler leads around it.

    Attributes:
        ranks: who skipped it.
        made: the call of a rank that makes it.
        head: the handler.
    """

    ranks: tuple[int, ...]
    made: CallRecord
    head: Location

    @property
    def cause(self) -> str:
        return (
            f"{ranks_text(self.ranks)} continued without this call: of the statements around it, "
            f"only `{self.head.source}` ({self.head}) leads past it, after an exception"
        )

    @property
    def fix(self) -> str:
        return (
            "do not call collectives in a `try` that continues after an exception: move "
            f"{self.made.signature.op} out of it, or re-raise in `{self.head.source}`, so that a "
            "failing rank exits"
        )


def swallowed(divergence: CallDivergence) -> SwallowedException | None:
    """The ranks that skipped a call because of a caught exception, where nothing else can have led
    them past it: they are further down in the function of the `try` around the others' call."""
    if divergence.shifted or "op" not in divergence.differs or len(divergence.calls) < 2:
        return None
    for made in divergence.calls.values():
        rest = {r: m for r, m in divergence.calls.items() if m.text != made.text}
        stay = [m for r, m in divergence.calls.items() if r not in rest]
        if not rest or not all(same_lines(m, made) for m in stay):
            continue
        tried, head = _handler(made) or (None, None)
        if tried and head and all(passed(m, made, tried) for m in rest.values()):
            return SwallowedException(tuple(sorted(rest)), made, head)
    return None


def _handler(made: CallRecord) -> tuple[Place, Location] | None:
    """The place of a call in a `try`, and the handler of that, where no other statement between the
    `try` and the call can lead around the call."""
    for place in made.site.places if made.site else ():
        spot = made.rank.location(place.site)
        for around in place.inside if spot else ():
            if spot and around.kind == "try" and around.ways:
                way = around.ways[0]
                return place, Location(spot.file, way.line, spot.function, way.text)
            if around.kind not in ("with", "try"):
                return None
    return None
