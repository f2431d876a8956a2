"""The branch that made ranks diverge, as only some of them took it."""

from __future__ import annotations

from ...events import Place, Statement
from ..calls.call_logs import CallRecord
from ..control_flow.branches import (
    avoided,
    branch,
    condition,
    is_inside,
    makes,
    same_lines,
)
from ..control_flow.jumps import line_in, loops_around
from .suspects import Suspect


def entered(suspect: Suspect) -> tuple[Place, Statement] | None:
    """The branch that only the suspects took: its condition is on the rank, or the others are
    past it in the same step and never made the call. None where no branch explains it."""
    place = suspect.call
    said = condition(place)
    found = said or branch(place)
    if found is None or around_all(suspect, *found):
        return None
    if said is not None:
        return said
    rest = suspect.rest
    past = all(avoided(place, m) or _is_round(suspect, m, *found) for m in rest)
    return found if rest and past else None


def by_their_rank(suspect: Suspect) -> bool:
    """Whether a condition on the rank leads to a call that only the suspects ever make, so
    that the others have not left a loop around it."""
    said = condition(suspect.call)
    if said is None or around_all(suspect, *said):
        return False
    rest = suspect.rest
    return bool(rest) and not any(makes(m.rank, suspect.call.spots) for m in rest)


def opposed(suspect: Suspect, place: Place, statement: Statement) -> bool:
    """Whether a rank that is not at fault is in another branch of the same `if`."""
    spot = suspect.call.rank.location(place.site)
    return spot is not None and any(
        enclosing.line != statement.line
        and (enclosing.opener or enclosing.line) == (statement.opener or statement.line)
        and (at := made.rank.location(there.site)) is not None
        and at.file == spot.file
        for number, made in suspect.divergence.calls.items()
        if number not in suspect.ranks
        for there in (made.site.places if made.site else ())
        for enclosing in there.inside
    )


def around_all(suspect: Suspect, place: Place, statement: Statement) -> bool:
    """Whether every rank is inside of a statement around the call, so that it explains nothing."""
    spot = suspect.call.rank.location(place.site)
    return spot is not None and all(
        is_inside(made.rank, made.site, spot.file, statement.line)
        for made in suspect.divergence.calls.values()
    )


def _is_round(suspect: Suspect, made: CallRecord, place: Place, statement: Statement) -> bool:
    """Whether a rank is in the next round of a loop around a branch without having made the call in
    the branch: right before, all ranks were in one call above it, and this rank is there again, or
    above.
    """
    call = suspect.call
    last = next((m for m in suspect.divergence.before if m.rank.rank == made.rank.rank), None)
    mine = next((m for m in suspect.divergence.before if m.rank.rank == call.rank.rank), None)
    if last is None or mine is None or not same_lines(last, mine) or last.step != mine.step:
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


def only_theirs(suspect: Suspect) -> bool:
    """Whether calls in a different order are an extra call after all: only the suspects entered the
    branch around it, and calls of the others that read the same are on other lines."""
    found = entered(suspect) if suspect.divergence.shifted else None
    if found is None or opposed(suspect, *found):
        return False
    return not any(makes(m.rank, suspect.call.spots) for m in suspect.rest)
