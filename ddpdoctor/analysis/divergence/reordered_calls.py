"""The same calls of the same lines, made in another order: nothing but the numbers of these lines
may tell that, or the names over which one line is looped."""

from __future__ import annotations

from collections import Counter

from ..calls.call_logs import CallLogs, CallRecord, GroupCalls, GroupKey
from ..control_flow.branches import arms, condition
from .divergence import WINDOW, CallDivergence

ROUNDS = 3
"""So often the ranks make them, each time in the same two orders. Names speak for themselves."""
_LONGEST = 16
"""Calls of one round at most."""

Pair = tuple[CallRecord, CallRecord]
Mark = tuple[object, ...]


def _mark(made: CallRecord) -> Mark:
    return (made.spots, made.key)


def turned(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int
) -> CallDivergence | None:
    """The parting at a call that comes from other lines, where all ranks make the same calls of the
    same lines in every round, and always in the same two orders; or one that is made for another
    name, where all make the same calls for the same names."""
    made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
    sides: dict[Mark, list[int]] = {}
    for rank, one in made.items():
        sides.setdefault(_mark(one), []).append(rank)
    if len(sides) < 2:
        return None
    most, other, *_ = sorted(sides.values(), key=lambda side: (-len(side), side))
    pairs = []
    for n in range(index, index + WINDOW):
        m, o = known.meant(logs[other[0]], n), known.meant(logs[most[0]], n)
        if m is None or o is None or m.what != o.what:
            break
        pairs.append((m, o))
    width = _width(pairs)
    if not width or _one_by_one(known, logs, index):
        return None
    culprits = tuple(sorted(r for r in made if len(other) == len(most) or r not in most))
    place = made[other[0]]
    before = tuple(m for r in made if (m := known.meant(logs[r], index - 1)) is not None)
    depth = place.handed if place.key else 0  # the loop
    return CallDivergence(
        key, index, made, (), True, False, culprits, place, depth, before=before, width=width
    )


def _width(pairs: list[Pair]) -> int:
    """How many calls a round takes; 0 where it is not the same calls, or not always these orders,
    or one may stand for the other."""
    orders: Counter[tuple[tuple[Mark, ...], ...]] = Counter()
    part: list[Pair] = []
    for m, o in pairs:
        part.append((m, o))
        if len({x.step for pair in part for x in pair}) > 1 or len(part) > _LONGEST:
            return 0
        ours, theirs = tuple(_mark(x) for x, _ in part), tuple(_mark(x) for _, x in part)
        if Counter(ours) != Counter(theirs):
            continue
        if ours != theirs and all(_by_name(*pair) for pair in part):
            return len(part)
        if ours != theirs:
            orders[ours, theirs] += 1
            if len(orders) > 1 or any(_in_turn(*pair) for pair in part):
                return 0
        part = []
    return len(next(iter(orders))[0]) if orders.total() >= ROUNDS else 0


def _one_by_one(known: CallLogs, logs: dict[int, GroupCalls], index: int) -> bool:
    """Whether each of three ranks or more is once on one line from that call on, while all others
    are on another one. Of two ranks that would say nothing."""
    turns: set[tuple[Mark, Mark]] = set()
    takers: set[int] = set()
    for n in range(index, index + len(logs)):
        here = {r: _mark(made) for r, log in logs.items() if (made := known.meant(log, n))}
        counts = Counter(here.values()).most_common()
        if len(counts) != 2 or counts[1][1] != 1:
            return False
        turns.add((counts[0][0], counts[1][0]))
        takers |= {r for r, mark in here.items() if mark == counts[1][0]}
    return len(logs) > 2 and len(turns) == 1 and len(takers) == len(logs)


def _in_turn(m: CallRecord, o: CallRecord) -> bool:
    """Whether two calls may be meant for each other, so that a rank takes its turn in one of them
    while the others are in the other one; barriers carry nothing."""
    if _mark(m) == _mark(o):
        return False
    return not _carries(m) or any((arms(m, o), condition(m), condition(o)))


def _by_name(m: CallRecord, o: CallRecord) -> bool:
    """Whether two calls of one line are told apart by their names alone."""
    return m.spots == o.spots and bool(m.key and o.key) and _carries(m)


def _carries(made: CallRecord) -> bool:
    return made.signature.op not in ("barrier", "DDP()")
