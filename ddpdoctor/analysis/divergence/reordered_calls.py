"""The same calls of the same lines in a different order, which shows only in the line numbers, or
in the names that one line loops over; and loops over names of which some ranks lack one."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from ..calls.call_logs import EMPTY, CallLogs, CallRecord, GroupCalls, GroupKey
from ..control_flow.branches import arms, condition, is_inside
from ..control_flow.jumps import loops_around
from .align import CallDivergence
from .thresholds import LONGEST_ROUND, ROUNDS, WINDOW

Pair = tuple[CallRecord, CallRecord]
Mark = tuple[object, ...]


def _mark(made: CallRecord) -> Mark:
    return (made.spots, made.key)


def reordered(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int
) -> CallDivergence | None:
    """The divergence at a call whose lines differ, where all ranks make the same calls of the same
    lines in every round, always in the same two orders; or whose names differ, where all make the
    same calls for the same names. None otherwise."""
    made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
    sides: dict[Mark, list[int]] = {}
    for rank, one in made.items():
        sides.setdefault(_mark(one), []).append(rank)
    if len(sides) < 2:
        return None
    most, other, *_ = sorted(sides.values(), key=lambda side: (-len(side), side))
    pairs = []
    for n in range(index, index + WINDOW):
        m, o = known.recorded(logs[other[0]], n), known.recorded(logs[most[0]], n)
        if m is None or o is None or m.what != o.what:
            break
        pairs.append((m, o))
    width = _width(pairs)
    if not width or _one_by_one(known, logs, index):
        return None
    side = tuple(r for r in made if (r in other if len(other) == len(most) else r not in most))
    return CallDivergence(
        key,
        index,
        made,
        (),
        shifted=True,
        extra=False,
        side=side,
        rest=tuple(most),
        added=made[other[0]],
        before=tuple(m for r in made if (m := known.recorded(logs[r], index - 1)) is not None),
        width=width,
    )


def lacking(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int
) -> CallDivergence | None:
    """The divergence at a call in a loop over names, where some ranks lack the name of this round:
    they are at a later one, or have left the loop. None otherwise."""
    made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
    sides: dict[Mark, list[int]] = {}
    for rank, one in made.items():
        sides.setdefault(_mark(one), []).append(rank)
    if len(sides) < 2:
        return None
    two = sorted(sides.values(), key=lambda side: (-len(side), side))[:2]
    for side, rest in (two, two[::-1]):
        ours, theirs = (_names(known, logs[s[0]], index, made[side[0]]) for s in (side, rest))
        names = tuple(n for n in ours if n not in theirs)
        if not names or names[0] != next(iter(ours)) or not _carries(made[side[0]]):
            continue
        # Where a rank was stopped in the loop, more names may have followed.
        stopped = known.at(logs[side[0]], index + len(ours)) is None
        own = bool({*theirs} - {*ours}) and not stopped
        if own and not all(_by_library(made[s[0]]) for s in (side, rest)):
            continue  # each has names of its own
        later = bool(theirs) and next(iter(theirs)) in ours
        own = own and next(iter(theirs)) not in ours
        past = not theirs and _is_past(known, logs, index, made[side[0]], made[rest[0]])
        if later or own or past:
            before = tuple(m for r in made if (m := known.at(logs[r], index - 1)) is not None)
            return CallDivergence(
                key, index, made, (), True, True, tuple(side), tuple(rest), made[side[0]],
                before=before, lacking=names,
            )  # fmt: skip
    return None


def _by_library(made: CallRecord) -> bool:
    """Whether a framework makes a call for a number that the program gave it by name: it keeps the
    result under that name."""
    return made.site is not None and bool(made.site.through) and made.site.set_at is not None


def _names(known: CallLogs, log: GroupCalls, index: int, loop: CallRecord) -> dict[str, CallRecord]:
    """The names that one run of a loop over names comes to on a rank, from a call on.

    Args:
        loop: a call of any rank in that loop.
    """
    found: dict[str, CallRecord] = {}
    for made in filter(_carries, known.window(log, index, WINDOW)):
        same = made.spots == loop.spots and made.step == loop.step
        again = made.key in found and made.key != next(reversed(found))
        if not same or not made.key or again:
            break
        found.setdefault(made.key, made)
    return found


def _is_past(
    known: CallLogs, logs: dict[int, GroupCalls], index: int, made: CallRecord, other: CallRecord
) -> bool:
    """Whether a rank has left a loop over names in which another rank is at its next one: both were
    at the same name in the call before."""
    pair = [known.recorded(logs[m.rank.rank], index - 1) for m in (made, other)]
    mine, theirs = pair
    if mine is None or theirs is None or not mine.key or mine.spots != made.spots:
        return False
    if _mark(mine) != _mark(theirs) or mine.step != made.step or mine.key == made.key:
        return False
    loop = next((head for _, head, _, _ in loops_around(made.rank, made.site)), None)
    return loop is not None and not is_inside(other.rank, other.site, loop.file, loop.line)


def _width(pairs: list[Pair]) -> int:
    """How many calls a round has; 0 where the calls are not the same, the orders vary, or calls may
    correspond to each other."""
    if named := _named_round(pairs):
        return named
    orders: Counter[tuple[tuple[Mark, ...], ...]] = Counter()
    part: list[Pair] = []
    for m, o in pairs:
        part.append((m, o))
        if len({x.step for pair in part for x in pair}) > 1 or len(part) > LONGEST_ROUND:
            return 0
        ours, theirs = tuple(_mark(x) for x, _ in part), tuple(_mark(x) for _, x in part)
        if Counter(ours) != Counter(theirs):
            continue
        if ours != theirs:
            orders[ours, theirs] += 1
            if len(orders) > 1 or any(_in_turn(*pair) for pair in part):
                return 0
        part = []
    return len(next(iter(orders))[0]) if orders.total() >= ROUNDS else 0


def _named_round(pairs: list[Pair]) -> int:
    """How many calls differ in their names alone, where the names that both ranks come to in this
    step have another order; 0 where they do not."""
    step = pairs[0][0].step if pairs else 0
    carrying = (pair for pair in pairs if _carries(pair[0]))
    part = list(takewhile(lambda p: _by_name(*p) and p[0].step == p[1].step == step, carrying))
    ours = list(dict.fromkeys(m.key for m, _ in part))
    theirs = list(dict.fromkeys(o.key for _, o in part))
    common = [key for key in ours if key in theirs]
    if common == [key for key in theirs if key in ours]:
        return 0
    return part[-1][0].index - pairs[0][0].index + 1


def _one_by_one(known: CallLogs, logs: dict[int, GroupCalls], index: int) -> bool:
    """Whether each of three or more ranks is on one line once while all others are on another one:
    they take turns, which is correct. Of two ranks that would say nothing."""
    turns: set[tuple[Mark, Mark]] = set()
    takers: set[int] = set()
    for n in range(index, index + len(logs)):
        here = {r: _mark(made) for r, log in logs.items() if (made := known.recorded(log, n))}
        counts = Counter(here.values()).most_common()
        if len(counts) != 2 or counts[1][1] != 1:
            return False
        turns.add((counts[0][0], counts[1][0]))
        takers |= {r for r, mark in here.items() if mark == counts[1][0]}
    return len(logs) > 2 and len(turns) == 1 and len(takers) == len(logs)


def _in_turn(m: CallRecord, o: CallRecord) -> bool:
    """Whether two calls may correspond, so that one rank makes one of them while the others make
    the other; barriers carry no data, so they always may."""
    if _mark(m) == _mark(o):
        return False
    return not _carries(m) or any((arms(m, o), condition(m), condition(o)))


def _by_name(m: CallRecord, o: CallRecord) -> bool:
    """Whether two calls of one line differ in their names alone."""
    return m.spots == o.spots and bool(m.key and o.key) and _carries(m)


def _carries(made: CallRecord) -> bool:
    """Whether a call carries data."""
    return made.signature.op not in EMPTY
