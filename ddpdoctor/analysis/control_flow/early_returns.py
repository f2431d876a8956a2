"""Functions that a rank called and came back from without the collective that another rank makes
in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...events import Place, Statement
from ...run import Location
from ..calls.call_logs import CallRecord
from .branches import condition, head_of, of_several_ranks, places, same_lines
from .jumps import OF_MODEL, SAME_ON_ALL, leaves_out


@dataclass(frozen=True)
class EarlyReturn:
    """A function that ranks called, and in which they did not come to a collective.

    Attributes:
        function: its name; caller: the line that called it.
        ways: the statements of the function, and of those that it called, that can lead around the
            collective, innermost first, with the line of each.
    """

    function: str
    caller: Location
    ways: tuple[tuple[Location, Statement], ...]

    @property
    def text(self) -> str:
        """`` `if not ready:` (train.py:17) leads out of it first``."""
        return " or ".join(_text(line, head) for line, head in self.ways)


def _text(line: Location, head: Statement) -> str:
    if head.kind == "past":
        return f"`{head.text}` ({line}) leads out of it first"
    return f"`{head.label}` ({line}) is not entered by all"


def early_return(
    call: CallRecord, others: Collection[CallRecord], before: Collection[CallRecord]
) -> EarlyReturn | None:
    """The innermost function around a call that all others are known to have come back from.

    Args:
        others: the present calls of the ranks that did not make `call`.
        before: the last call that was the same on all ranks, of each of them.
    """
    if condition(call) is not None or not others:
        return None
    start = next((m for m in before if m.rank.rank == call.rank.rank), None)
    starts = {m.rank.rank: m for m in before}
    for depth in range(1, len(places(call))):
        if all(_came_back(call, m, depth, start, starts.get(m.rank.rank)) for m in others):
            return _found(call, depth, starts.values())
    return None


def early_return_in_round(call: CallRecord) -> EarlyReturn | None:
    """The same for ranks that are known only to have done all rounds of the loops around a call:
    these have the same number of rounds everywhere, and nothing in them leads around the function.
    """
    if condition(call) is not None:
        return None
    for depth in range(1, len(places(call))):
        loops = [s for p in places(call)[depth:] for s in p.inside if s.is_loop]
        if loops and all(_is_plain(call, d) for d in range(depth, len(places(call)))):
            return _found(call, depth)
    return None


def early_return_to(call: CallRecord, other: CallRecord) -> EarlyReturn | None:
    """The same for a rank that is known to have gone past a call, from where it is now."""
    if condition(call) is not None:
        return None
    for depth in range(1, len(places(call))):
        spot = call.location_at(depth)
        if spot is not None and _line(other, spot) is not None:
            return _found(call, depth)
    return None


def _is_plain(call: CallRecord, depth: int) -> bool:
    """Whether every round of the loops in one function comes to the line that led to a call."""
    spot, place = call.location_at(depth), places(call)[depth]
    return spot is not None and all(
        SAME_ON_ALL.match(head.text) is not None and not head.ways and not head.exits
        if head.is_loop
        else head.kind in ("with", "decorated") or "__name__" in head.text or head.line == spot.line
        for head in place.inside
    )


def _found(call: CallRecord, depth: int, before: Collection[CallRecord] = ()) -> EarlyReturn | None:
    """The function that was called so many callers up, and what can lead around the call.

    Args:
        before: the calls right before. What they came past in the same function, on another object,
            is asked last: it has just led all ranks to the same line.
    """
    caller, first = call.location_at(depth), call.location_at(depth - 1)
    if caller is None or first is None:
        return None
    ways: list[tuple[Location, Statement]] = []
    passed: list[tuple[Location, Statement]] = []
    for below in range(depth):
        spot = call.location_at(below)
        again = bool(before) and all(any(at == spot for _, at in _spots(m)) for m in before)
        for head in places(call)[below].inside if spot else ():
            if head.is_loop and not _same_rounds(head):
                return None  # it may have had no round
            if spot and (head.is_branch or head.kind == "past") and of_several_ranks(head):
                (passed if again else ways).append((head_of(spot, head), head))
            if spot and head.kind == "try" and head.ways:
                return None  # an exception may have led around it
    found = tuple(ways or passed)
    return EarlyReturn(first.function, caller, found) if found else None


def _same_rounds(loop: Statement) -> bool:
    return bool(SAME_ON_ALL.match(loop.text) or OF_MODEL.match(loop.text))


def _came_back(
    call: CallRecord,
    made: CallRecord,
    depth: int,
    start: CallRecord | None,
    before: CallRecord | None,
) -> bool:
    """Whether a rank is past the line that led another rank to its call, so many callers up."""
    place, spot = places(call)[depth], call.location_at(depth)
    if spot is None or start is None or before is None or not same_lines(start, before):
        return False
    if start.step != before.step or not _same_outer_lines(call, depth, made, spot):
        return False
    here = _line(made, spot)
    if here is None:
        return False
    line, there = here
    heads = [h for h in place.inside if h.line != spot.line]
    if any(h.is_branch or h.kind in ("past", "try") for h in heads if h not in there.inside):
        return False
    loops = [h for h in heads if h.is_loop]
    if line > spot.line and all(h in there.inside for h in loops):
        return made.step in (call.step, call.step + 1)
    # Both came to the same line of one round; the other is there again, or above: a later round.
    began = _line(start, spot)
    shared = next((h for h in loops if h in there.inside and began and h in began[1].inside), None)
    if shared is None or began is None or not line <= began[0] < spot.line:
        return False
    if any(leaves_out(way, spot.line, place) for way in shared.ways):
        return False
    inner = any(h.is_loop and h not in heads for h in there.inside)
    return made.step > call.step or (made.step == call.step and not inner)


def _same_outer_lines(call: CallRecord, depth: int, made: CallRecord, spot: Location) -> bool:
    """Whether the function of a caller was called by the same lines on both ranks."""
    n = next((n for n, s in _spots(made) if (s.file, s.function) == (spot.file, spot.function)), -1)
    ours = [call.location_at(d) for d in range(depth + 1, len(places(call)))]
    theirs = [made.location_at(d) for d in range(n + 1, len(places(made)))]
    return n >= 0 and all(a == b for a, b in zip(ours, theirs, strict=False))


def _line(made: CallRecord, spot: Location) -> tuple[int, Place] | None:
    """The line in a function that led to a call, and its place."""
    for depth, at in _spots(made):
        if (at.file, at.function) == (spot.file, spot.function):
            return at.line, places(made)[depth]
    return None


def _spots(made: CallRecord) -> Iterator[tuple[int, Location]]:
    for depth in range(len(places(made))):
        at = made.location_at(depth)
        if at is not None:
            yield depth, at
