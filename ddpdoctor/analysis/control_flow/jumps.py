"""The statements that skip the rest of a round of a loop, or end the loop."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...events import CALLERS, CallSite, ExceptionPassed, Place, Statement, Way
from ...run import Location, Rank
from ..calls.call_logs import CallRecord
from ..calls.rank_conditions import ON_RANK, unquoted
from .branches import around, places
from .caught_exceptions import handler
from .loop_rounds import until_call

Key = tuple[str, int, str]
"""File, line and function of a loop's head."""

SAME_ON_ALL = re.compile(r"for .+ in range\([\d_, ]+\):")
"""A loop with the same number of rounds on every rank."""
OF_MODEL = re.compile(
    r"for .+ in .*\b(?:params?|param_groups|grads|(?:named_)?(?:parameters|buffers|modules))\b.*:"
)
"""A loop over the parts of a model, which are the same on every rank."""
_ENDLESS = re.compile(r"while (?:True|1):|for .+ in (?:itertools\.)?count\(.*\):")


def loops_around(
    rank: Rank, site: CallSite | None
) -> Iterator[tuple[Key, Location, int, Statement]]:
    """The loops around a call, innermost first: key, head, how many callers up, and statement."""
    for depth, spot, loop in around(rank, site):
        if loop.is_loop:
            head = Location(spot.file, loop.line, spot.function, loop.text)
            yield (spot.file, loop.line, spot.function), head, depth, loop


def in_same_run(rank: Rank, site: CallSite | None, still: CallRecord, loop: Key) -> bool:
    """Whether two calls are in the same loop, and the same lines led to it: a function that is
    called from two places runs its loop twice.

    Args:
        still: the other call, which is in the loop.
    """
    theirs = [_led_by(still.rank, still.site, d) for d in _depths(still.rank, still.site, loop)]
    return any(
        all(a == b for a, b in zip(_led_by(rank, site, depth), callers, strict=False))
        for depth in _depths(rank, site, loop)
        for callers in theirs
    )


def _depths(rank: Rank, site: CallSite | None, loop: Key) -> list[int]:
    """How many callers up from a call a loop is, once for each time that it is around the call."""
    return [depth for key, _, depth, _ in loops_around(rank, site) if key == loop]


def _led_by(rank: Rank, site: CallSite | None, depth: int) -> list[Location | None]:
    """The lines of the callers beyond `depth`, innermost first."""
    return [rank.location(place.site) for place in (site.places if site else ())[depth + 1 :]]


def ways_around(made: CallRecord, ends: bool = False) -> tuple[Location, ...]:
    """The statements that can skip a call in a round of the loops around it.

    Args:
        ends: count statements that end a loop, too.
    """
    found = []
    for _, head, depth, each in loops_around(made.rank, made.site):
        spot, place = made.location_at(depth), places(made)[depth]
        found += [
            Location(head.file, way.line, head.function, way.text)
            for way in (*each.ways, *(each.exits if ends else ()))
            if spot is not None and leaves_out(way, spot.line, place)
        ]
    return tuple(found)


def ways_out(made: CallRecord, loop: Location) -> tuple[tuple[Location, ...], bool]:
    """The statements that skip a call in a loop, and whether any statement ends the loop."""
    key = (loop.file, loop.line, loop.function)
    inside = [
        (depth, site, each)
        for site in made.rank.of(CallSite)
        for at, _, depth, each in loops_around(made.rank, site)
        if at == key
    ]
    places = [site.places[depth] for depth, site, _ in inside]
    calls = [(s.line, p) for p in places if (s := made.rank.location(p.site)) is not None]
    found = {
        way.line: Location(loop.file, way.line, loop.function, way.text)
        for _, _, each in inside
        for way in each.ways
        if any(leaves_out(way, line, place) for line, place in calls)
    }
    return tuple(found.values()), any(each.exits for _, _, each in inside)


def leaves_out(way: Way, line: int, place: Place) -> bool:
    """Whether a statement that ends a round skips a line: not where it is in another branch of the
    same `if`."""
    other_arm = any(
        arm.opener <= way.line < arm.line
        for arm in place.inside
        if arm.opener and arm.kind in ("elif", "else")
    )
    return way.first <= line <= way.last and not other_arm


def depth_in(made: CallRecord, loop: Location) -> int | None:
    """How many callers up from a call a loop is; None where a branch in the loop leads to it."""
    for depth, spot, head in around(made.rank, made.site):
        if (spot.file, head.line) == (loop.file, loop.line):
            return depth
        if head.is_branch:
            return None
    return None


def same_function(a: Location, b: Location) -> bool:
    return (a.file, a.function) == (b.file, b.function)


def same_rounds(loop: Location, *ranks: Rank) -> bool:
    """Whether a loop has the same number of rounds on these ranks, unless a statement ends it: by
    its head, or by the values that its variables had."""
    if SAME_ON_ALL.match(loop.source):
        return True
    key = (loop.file, loop.line, loop.function)
    counts = {
        site.places[depth].rounds.get(loop.line, -1)
        for rank in ranks
        for site in rank.of(CallSite)
        for at, _, depth, _ in loops_around(rank, site)
        if at == key
    }
    return len(counts) == 1 and counts.pop() >= 0


def uneven(loop: Location, *ranks: Rank) -> bool:
    """Whether a loop may have a different number of rounds on each of these ranks."""
    return not same_rounds(loop, *ranks) and not OF_MODEL.match(loop.source)


def whole(made: CallRecord, loop: Location) -> bool:
    """Whether a rank that begins a loop does all of its rounds, with the call in each."""
    ways, broken = ways_out(made, loop)
    here = depth_in(made, loop) is not None
    return SAME_ON_ALL.match(loop.source) is not None and here and not ways and not broken


def catching(rank: Rank, site: CallSite | None) -> Iterator[Location]:
    """The handlers of the innermost `try` around a call, in any function."""
    for _, spot, head in around(rank, site):
        if head.kind == "try" and head.ways:
            for way in head.ways:
                yield Location(spot.file, way.line, spot.function, way.text)
            return


class LoopEnd(NamedTuple):
    """What ends a loop.

    Attributes:
        decides: the statement that decides about it: `jump`, or the one that sets the flag that
            `jump` asks for.
        guard: the condition on the rank around `decides`, innermost, in the loop.
    """

    decides: Location
    jump: Location
    loop: Location
    guard: Location | None


def exits(
    leaver: Rank, last: CallSite | None, stay: CallRecord, loop: Location, sure: bool, even: bool
) -> list[LoopEnd]:
    """The statements one of which ended a loop on a rank that left it, or a loop inside of it.
    Empty where the loop may as well have ended by its head.

    Args:
        last: the last call of the rank that left; stay: a call of another rank in the loop.
        sure: the loop did not end by its head.
        even: the loops inside of it have the same number of rounds on all ranks.
    """
    key = (loop.file, loop.line, loop.function)
    ended = {
        (way.line, way.set_line): (way, loop)
        for site in stay.rank.of(CallSite)
        for at, _, _, each in loops_around(stay.rank, site)
        if at == key
        for way in each.exits
    }
    begin, end = line_in(leaver, last, key), line_in(stay.rank, stay.site, key)
    if begin is None and last is not None and depth_in(stay, loop) is not None:
        begin = loop.line  # it left in the first round, before any call
    if begin is not None and end is not None:
        same_round = begin < end
        ended = {
            n: found
            for n, found in ended.items()
            if (begin < n[0] < end if same_round else n[0] > begin or n[0] < end)
        }
        sure = sure or same_round
    sure = sure or _is_endless(loop, ended.values())
    counted = even and same_rounds(loop, leaver, stay.rank)
    if counted and not sure:
        # A loop inside of it that ended early makes fewer calls, too.
        for head, each in _within(stay, key):
            inner = {(way.line, way.set_line): (way, head) for way in each.exits}
            ended = {**inner, **ended}
    found = {}
    for way, head in ended.values():
        here = _decides(way, head)
        if sure or ON_RANK.search(here.source) or (counted and not _unseen(leaver, here)):
            jump = Location(head.file, way.line, head.function, way.text)
            found[here] = LoopEnd(here, jump, head, _guard(way, here))
    # What asks for the rank ends it on some ranks only.
    on_rank = [e for e in found.values() if e.guard or ON_RANK.search(unquoted(e.decides.source))]
    return on_rank or list(found.values())


def _within(stay: CallRecord, loop: Key) -> Iterator[tuple[Location, Statement]]:
    """The loops around a call that are inside of a loop, innermost first."""
    for at, head, _, each in loops_around(stay.rank, stay.site):
        if at == loop:
            return
        yield head, each


def _is_endless(loop: Location, ways: Iterable[tuple[Way, Location]]) -> bool:
    """Whether a loop ends by one of its statements only: its head has no condition, or just asks
    for a flag that they set."""
    return _ENDLESS.match(loop.source) is not None or any(w.line == loop.line for w, _ in ways)


def _decides(way: Way, loop: Location) -> Location:
    """The statement that decides about a jump in a loop."""
    line, text = (way.set_line, way.set_by) if way.set_line else (way.line, way.text)
    return Location(loop.file, line, way.set_in or loop.function, text)


def _guard(way: Way, decides: Location) -> Location | None:
    """The condition on the rank around the statement that decides about a jump."""
    lines = ((n, text) for n, text in way.around if ON_RANK.search(unquoted(text)))
    return next((Location(decides.file, n, decides.function, t) for n, t in lines), None)


def may_end(stay: CallRecord, loop: Location) -> Location | None:
    """The conditional statement that ends a loop around a call, or a loop inside of it; None where
    there are several."""
    key = (loop.file, loop.line, loop.function)
    around = [(h, e) for at, h, _, e in loops_around(stay.rank, stay.site) if at == key]
    ends = {
        _decides(way, head) for head, each in (*_within(stay, key), *around) for way in each.exits
    }
    only = ends.pop() if around and len(ends) == 1 else None
    return only if only and only.source.startswith(("if ", "elif ")) else None


def _unseen(rank: Rank, way: Location) -> bool:
    """Whether a statement is a handler that was not seen to catch anything."""
    passed = rank.of(ExceptionPassed)
    return way.source.startswith("except") and not any(handler(rank, e, [way]) for e in passed)


def line_in(rank: Rank, site: CallSite | None, loop: Key) -> int | None:
    """The line in the function of a loop that leads to a call; None where it is not in the loop."""
    for key, _, depth, _ in loops_around(rank, site):
        spot = rank.location(site.places[depth].site) if site else None
        if key == loop and spot is not None:
            return spot.line
    return None


def has_left(made: CallRecord, still: CallRecord, loop: Key) -> bool:
    """Whether a rank made calls in a loop before, entered by the same lines, and is known to be
    outside of the loop now.

    Args:
        made: its present call; still: a call of another rank in the loop.
    """
    depth = next(d for key, _, d, _ in loops_around(still.rank, still.site) if key == loop)
    ours, theirs = places(made), places(still)
    here = [n for n, p in enumerate(ours) if _function(made, p) == (loop[0], loop[2])]
    if not here and len(ours) >= CALLERS and not _elsewhere(made, still, depth):
        return False  # it may be in the loop by callers beyond those on record
    for n in here:
        callers = zip(ours[n + 1 :], theirs[depth + 1 :], strict=False)
        if any(made.rank.location(p.site) != still.rank.location(q.site) for p, q in callers):
            return False  # another call of the function says nothing about this loop
    rank, until = until_call(made)
    return any(
        site.at <= until and in_same_run(rank, site, still, loop) for site in rank.of(CallSite)
    )


def left_at_once(made: CallRecord, still: CallRecord, loop: Key) -> bool:
    """Whether a rank that made no call in this run of a loop has left it in its first round.

    A statement that ends the loop comes before the call of the other rank, and its own call is
    behind the loop: not in a later round of a loop there, which it may do once more than others.
    """
    line = line_in(still.rank, still.site, loop)
    around_still = {key for key, _, _, _ in loops_around(still.rank, still.site)}
    ends = [
        way.last
        for key, _, _, each in loops_around(still.rank, still.site)
        if key == loop
        for way in each.exits
        if line is not None and way.line < line
    ]
    spots = [made.rank.location(p.site) for p in places(made)]
    behind = any(
        spot is not None and (spot.file, spot.function) == (loop[0], loop[2]) and spot.line > end
        for spot in spots
        for end in ends
    )
    own = [
        head for key, head, _, _ in loops_around(made.rank, made.site) if key not in around_still
    ]
    return behind and all(whole(made, head) for head in own)


def _elsewhere(made: CallRecord, still: CallRecord, depth: int) -> bool:
    """Whether a function that leads to the loop led to the call by another line instead."""
    outer = {still.rank.location(place.site) for place in places(still)[depth + 1 :]}
    return any(
        spot is not None and spot not in outer and any(o and same_function(spot, o) for o in outer)
        for spot in (made.rank.location(place.site) for place in places(made))
    )


def _function(made: CallRecord, place: Place) -> tuple[str, str] | None:
    spot = made.rank.location(place.site)
    return (spot.file, spot.function) if spot else None
