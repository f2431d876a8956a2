"""Ranks in different rounds of a loop, which shows in a call that comes in some rounds only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...events import ExceptionPassed, Statement
from ...run import Location
from ..calls.call_logs import CallRecord
from ..control_flow.branches import condition, is_inside, places, same_lines
from ..control_flow.caught_exceptions import handler
from ..control_flow.jumps import OF_MODEL, SAME_ON_ALL, Key, leaves_out, loops_around
from ..control_flow.loop_rounds import iterations_of, skipped_in, until_call
from ..waiting.failures import LOST_PEER
from .align import CallDivergence
from .left_loop import LeftLoop, LoopExitKind

_COUNTED = re.compile(r"for (\w+) in range\([\w.]+\):")
_NUMBERED = re.compile(r"for (\w+), .+ in (?:\w+\.)*(?:tqdm\()?enumerate\((?!.*\bstart\b)[^,]+\):")
_SETTINGS = re.compile(r"%\s*[A-Za-z_][\w.]*|==\s*[A-Za-z_][\w.]*\s*-\s*1\b")
_WORD = re.compile(r"[A-Za-z_][\w.]*")


def skipped_round(divergence: CallDivergence) -> LeftLoop | None:
    """Who skipped a round, where some ranks are in a call that depends on the number of the round,
    and the others in one of every round; or the rest of one, where some begin the next round with
    the call that began this one. None where that is not clear."""
    if (begun := _next_round(divergence)) is not None:
        return begun
    if any(condition(made) for made in divergence.calls.values()):
        return None
    for key, head in _loops_of_all(divergence):
        name = _number(head)
        turn = _by_round(divergence, key, name)
        if turn is None:
            continue
        here = {
            r for r, m in divergence.calls.items() if is_inside(m.rank, m.site, key[0], turn.line)
        }
        rest = {*divergence.calls} - here
        ways = tuple(w for w in _ways(divergence, key, rest) if not _reads_only(w.source, name))
        if rest and ways and _comparable(divergence, key, head):
            skipped = _skipped(divergence, ways, head)
            known = skipped in (here, rest)
            ranks = sorted(skipped if known else divergence.calls)
            how = LoopExitKind.SKIPPED
            return LeftLoop(ranks, head, how, ways=ways, known=known, turn=turn.text)
    return None


def _next_round(divergence: CallDivergence) -> LeftLoop | None:
    """Who begins the next round of a loop while the others are in the rest of this one, which a
    statement after the call that all made last can skip."""
    last = {m.rank.rank: m for m in divergence.before}
    calls = divergence.calls
    if last.keys() != calls.keys():
        return None
    one = next(iter(last.values()))
    again = sorted(r for r, made in calls.items() if same_lines(made, one))
    if not again or len(again) == len(calls) or not all(same_lines(m, one) for m in last.values()):
        return None
    key, head, depth, loop = next(loops_around(one.rank, one.site), (None, None, 0, None))
    began = one.location_at(depth)
    if key is None or head is None or loop is None or began is None:
        return None
    if not _in_every_round(one, key, depth, set()):
        return None
    found: dict[int, Location] | None = None
    for made in divergence.others(again):
        lines = {}
        for at, _, level, around in loops_around(made.rank, made.site):
            spot = made.location_at(level)
            if at == key and spot is not None and spot.line > began.line:
                lines = {
                    way.line: Location(key[0], way.line, key[2], way.text)
                    for way in around.ways
                    if way.line > began.line and leaves_out(way, spot.line, places(made)[level])
                }
                if not _in_every_round(made, key, level, {*lines}):
                    return None
        found = lines if found is None else {n: w for n, w in found.items() if n in lines}
    if not found:
        return None
    return LeftLoop(again, head, LoopExitKind.SKIPPED, ways=tuple(found.values()))


def _loops_of_all(divergence: CallDivergence) -> Iterator[tuple[Key, Location]]:
    """The loops around the calls of all ranks, and around their calls before."""
    every = [
        {key: head for key, head, _, _ in loops_around(made.rank, made.site)}
        for made in (*divergence.calls.values(), *divergence.before)
    ]
    if divergence.before:
        yield from ((k, head) for k, head in every[0].items() if all(k in e for e in every))


def _number(loop: Location) -> str:
    """The loop's variable for the number of a round; empty where it has none."""
    counted = _COUNTED.match(loop.source) or _NUMBERED.match(loop.source)
    return counted[1] if counted else ""


def _by_round(divergence: CallDivergence, key: Key, name: str) -> Statement | None:
    """The branch in a loop that some ranks are in and that depends on the number of the round."""
    return next(
        (
            around
            for made in divergence.calls.values()
            for around in _within(made, key)
            if around.kind == "if" and _goes_by(around.test, name)
        ),
        None,
    )


def _goes_by(text: str, name: str) -> bool:
    """Whether a condition depends only on the number of the round and a divisor:
    `if (i + 1) % args.every == 0:`."""
    return "%" in text and name in _WORD.findall(text) and _reads_only(text, name)


def _reads_only(text: str, name: str) -> bool:
    rest = {*_WORD.findall(_SETTINGS.sub("", text.partition("#")[0]))}
    return rest <= {name, "if", "elif", "and", "or", "not"}


def _within(made: CallRecord, key: Key) -> Iterator[Statement]:
    """The statements between a call and a loop around it, in the loop's function."""
    for _, _, depth, loop in loops_around(made.rank, made.site):
        spot = made.location_at(depth)
        if spot and (spot.file, loop.line, spot.function) == key:
            inside = places(made)[depth].inside
            yield from inside[: inside.index(loop)]
            return


def _ways(divergence: CallDivergence, key: Key, rest: set[int]) -> tuple[Location, ...]:
    """The statements that skip the calls of both sides; none where another one may skip the call of
    the `rest` alone."""
    found: dict[int, Location] | None = None
    for rank, made in divergence.calls.items():
        depth, loop = next(
            (depth, around)
            for at, _, depth, around in loops_around(made.rank, made.site)
            if at == key
        )
        spot, place = made.location_at(depth), places(made)[depth]
        lines = {
            way.line: Location(key[0], way.line, key[2], way.text)
            for way in loop.ways
            if spot is not None and leaves_out(way, spot.line, place)
        }
        found = lines if found is None else {n: way for n, way in found.items() if n in lines}
        if rank in rest and not _in_every_round(made, key, depth, {*lines}):
            return ()
    return tuple(found.values()) if found else ()


def _in_every_round(made: CallRecord, key: Key, depth: int, ways: set[int]) -> bool:
    """Whether a call in a loop comes in every round, unless a statement on one of the lines `ways`
    skips it."""
    inner = (around for place in places(made)[:depth] for around in place.inside)
    return all(_is_entered(around, set()) for around in inner) and all(
        _is_entered(around, ways) for around in _within(made, key)
    )


def _is_entered(around: Statement, ways: set[int]) -> bool:
    text = around.text
    if around.kind == "past":
        return around.opener in ways
    if around.kind == "try":
        return {way.line for way in around.ways} <= ways
    even = OF_MODEL.match(text) or SAME_ON_ALL.match(text)
    return bool(even) or around.kind in ("with", "decorated")


def _comparable(divergence: CallDivergence, key: Key, loop: Location) -> bool:
    """Whether rounds with the same number correspond on all ranks: the loop has equally many on
    each, or they are of one epoch of a loader, or no loop is around it."""
    made = list(divergence.calls.values())
    last = [iterations_of(until_call(m), loop)[-1:] for m in made]
    if all(last):
        return len({(i.loader, i.began.epoch) for (i,) in last}) == 1
    around = [{k: loop for k, _, _, loop in loops_around(m.rank, m.site)} for m in made]
    order = [list(loops) for loops in around]
    outer = any(keys.index(key) < len(keys) - 1 for keys in order)
    even = SAME_ON_ALL.match(loop.source) and not any(loops[key].broken for loops in around)
    return not any(last) and bool(even or not outer)


def _skipped(divergence: CallDivergence, ways: tuple[Location, ...], loop: Location) -> set[int]:
    """The ranks that caught an exception that others did not, or took no step for a batch."""
    raised = {rank: _caught(made, ways) for rank, made in divergence.calls.items()}
    if any(raised.values()):
        everywhere = set.intersection(*raised.values())
        return {rank for rank, events in raised.items() if events - everywhere}
    leavers = {rank: until_call(made) for rank, made in divergence.calls.items()}
    counts = {r: skipped_in(at, iterations_of(at, loop)) for r, at in leavers.items()}
    least = min(counts.values())
    return {rank for rank, count in counts.items() if count > least}


def _caught(made: CallRecord, ways: tuple[Location, ...]) -> set[tuple[str, str, int]]:
    """The exceptions that one of the handlers among `ways` may have caught on a rank."""
    rank, until = until_call(made)
    handlers = [way for way in ways if way.source.startswith("except")]
    return {
        (e.kind, str(rank.location(e.site)), e.step)
        for e in rank.of(ExceptionPassed)
        if e.at <= until and handlers and not LOST_PEER.search(e.message)
        if e.where in ("forward", "backward", "data") or handler(rank, e, handlers)
    }
