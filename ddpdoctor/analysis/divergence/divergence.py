"""Where the ranks' calls part: at one number of one group they are not in the same call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from ...events import CALLERS
from ...report.findings import Steps
from ...run import Location
from ..calls.call_logs import CallLogs, CallRecord, GroupCalls, GroupKey
from ..control_flow.branches import (
    arms,
    avoided,
    branch,
    called_apart,
    condition,
    same_lines,
    within,
)
from ..control_flow.jumps import Key, in_same_run
from .periodic_calls import HISTORY, left_out

WINDOW = 64


@dataclass(frozen=True)
class CallDivergence:
    """A call of a group in which ranks differ, and in which they did not before.

    Attributes:
        made: what each rank called there (only ranks with that call on record).
        differs: names of what differs (`op`, `numel`, `dtype`, ...); empty where everything
            agrees but the lines: the ranks call the same things in another order.
        shifted: the ranks' sequences are the same but for calls made by some only, or swapped.
        depth: how many callers up the ranks' lines differ (all may go through one helper).
        extra: a call that one side makes and the other does not, where that can be told.
        elsewhere: the ranks are on different lines: it is not one call with other arguments.
        odd: ranks at fault; place: the call a person would point at.
        left_out: where the ranks at fault left that call out, the earlier rounds in all of which
            they made it.
        before: what each rank called before that.
        width: so many calls on they make the same ones again, 0 where that is not seen.
        again: the later calls in which they differ in the same way; `steps`: of all of them, up to
            step `until` where there were too many to look on.
        after: 1 where these calls come after a step, of which so many were taken by then; 0 where
            they come in the next one.
        over: they come after all steps, and outside of the loop of these: they are in none.
    """

    key: GroupKey
    index: int
    made: dict[int, CallRecord]
    differs: tuple[str, ...]
    shifted: bool
    extra: bool
    culprits: tuple[int, ...]
    place: CallRecord
    depth: int = 0
    elsewhere: bool = False
    left_out: int = 0
    before: tuple[CallRecord, ...] = ()
    width: int = 0
    again: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    until: int | None = None
    after: int = 0
    over: bool = False

    def may_be_left(self, still: CallRecord, loop: Key) -> bool:
        """Whether some may have left a loop before the one that is in it: not where all were
        outside of it in the call before, or in it from other lines, so that who is in it came anew;
        nor where another thread makes a call."""
        if len({made.site.thread for made in self.made.values() if made.site}) > 1:
            return False
        return not self.before or any(
            not _knows_all_of(made, loop[0], loop[2])
            or in_same_run(made.rank, made.site, still, loop)
            for made in self.before
        )

    @property
    def when(self) -> Steps | None:
        found = Steps.of(map(self.step, [self.place.step, *self.steps]))
        if found is None or self.until is None:
            return found
        return Steps(found.first, found.last, found.count, self.until - found.first + 1)

    def step(self, taken: int) -> int:
        """The step of a call before which so many were taken, -1 for none and for unknown."""
        if self.over:
            return -1
        return max(taken - self.after, min(taken, 0))

    @property
    def location(self) -> Location | None:
        """The line to point at: of a helper that all ranks share, or that other ranks are not in,
        the line that called it; of one that hands on the arguments in which they differ, the line
        that made these."""
        depth = self.depth or called_apart(self.place, self.made.values())
        return self.place.location_at(depth or self.handed)

    @property
    def handed(self) -> int:
        """How far up the stack of callers that line is, where all ranks are on the same ones."""
        one = self.same_call and len({made.text for made in self.made.values()}) == 1
        return self.place.handed if one else 0

    @property
    def same_call(self) -> bool:
        """Whether it is the same call with other arguments."""
        return "op" not in self.differs and not self.shifted and not self.elsewhere


def _knows_all_of(made: CallRecord, file: str, function: str) -> bool:
    """Whether a call's lines tell in which statements of a function it is, if in any."""
    places = made.site.places if made.site else ()
    spots = (made.rank.location(place.site) for place in places)
    return 0 < len(places) < CALLERS or any(
        spot is not None and (spot.file, spot.function) == (file, function) for spot in spots
    )


_PARTS = ("op", "numel", "dtype", "device", "reduce_op", "root", "ranks")


def judge(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int, end: int
) -> CallDivergence | None:
    """The parting at that call, if it is one.

    Args:
        end: where the calls themselves differ, -1 if they never do.
    """
    made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
    sides = _sides(made)
    if len(sides) < 2:
        return None
    # The two largest sides stand for all: who else differs, differs from the larger one too.
    one, other = sides[1], sides[0]
    if index == end and (extra := _too_many(known, key, logs, index, (one, other))) is not None:
        return extra
    a = list(known.window(logs[one[0]], index, WINDOW))
    b = list(known.window(logs[other[0]], index, WINDOW))
    differs = tuple(
        name
        for n, name in enumerate(_PARTS)
        if len({m.what[n] for m in made.values()}) > 1
    )  # fmt: skip
    if "op" in differs or _of_several_models(made):
        differs = ("op",)
    shift = _shift(a, b)
    if not differs and (shift is None or _harmless(a, b, shift, end - index)):
        return None
    swapped = bool(differs) and shift is None and _swapped(a, b)
    place, culprits = _fault(known, logs, index, a, b, one, other, shift, made)
    apart = bool(differs) and a[0].text != b[0].text and arms(a[0], b[0]) is None
    earlier = 0
    if apart and shift is None and (missed := left_out(known, logs, index, made)):
        place, culprits, earlier = missed
    return CallDivergence(
        key=key,
        index=index,
        made=made,
        differs=() if swapped else differs,
        shifted=shift is not None or swapped,
        extra=shift is not None and shift.only_one_side,
        elsewhere=apart,
        left_out=earlier,
        culprits=culprits,
        place=place,
        before=tuple(m for r in made if (m := known.at(logs[r], index - 1)) is not None),
        depth=_depth(
            place, [m for m in made.values() if (m.rank.rank in culprits) is bool(earlier)] or b
        ),
    )


def _of_several_models(made: dict[int, CallRecord]) -> bool:
    """Whether these are what different models communicate themselves, so that the gradients of one
    are summed up with those of another."""
    return len({m.model for m in made.values()} - {None}) > 1


def _too_many(
    known: CallLogs,
    key: GroupKey,
    logs: dict[int, GroupCalls],
    end: int,
    sides: tuple[list[int], list[int]],
) -> CallDivergence | None:
    """A call too many that was paired with the others' next one of its kind, so that the ranks part
    only at the `end`: from there on its callers are a call behind, each time on the line on which
    the others were the call before."""
    for callers, rest in (sides, sides[::-1]):
        mine, theirs, index = logs[callers[0]], logs[rest[0]], end
        while index > max(0, end - WINDOW):
            now, before, there = (
                known.at(log, i)
                for log, i in ((mine, index), (mine, index - 1), (theirs, index - 1))
            )
            if now is None or before is None or there is None or not same_lines(now, there):
                break
            if same_lines(before, there) or arms(before, there) is not None:
                break
            index, place = index - 1, before
        if index < end:
            made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
            culprits = _minority(callers, rest, place, known)
            depth = _depth(place, [made[r] for r in rest])
            return CallDivergence(key, index, made, (), True, True, culprits, place, depth)
    return None


def _sides(
    made: dict[int, CallRecord], of: Callable[[CallRecord], object] = lambda m: None
) -> list[list[int]]:
    """Ranks that made the same call from lines that read the same, and agree in what is asked `of`
    them, the largest side first."""
    sides: dict[object, list[int]] = {}
    hard = len({m.what for m in made.values()}) > 1
    for rank, m in made.items():
        sides.setdefault(m.what if hard else (m.what, m.text, of(m)), []).append(rank)
    return sorted(sides.values(), key=lambda s: (-len(s), s))


@dataclass(frozen=True)
class Shift:
    """How two sequences differ: calls of `a` (or of `b`) that the other side has not there."""

    side: str
    start: int
    end: int
    only_one_side: bool


def _shift(a: list[CallRecord], b: list[CallRecord]) -> Shift | None:
    """The first calls that one side has and the other not; None where the calls only differ.

    `if rank == 0: broadcast(x) else: broadcast(y)` puts different lines at the same numbers and is
    right: nothing is inserted, nothing left out.
    """
    xs, ys = _alike(a, b)
    blocks = SequenceMatcher(None, xs, ys, autojunk=False).get_opcodes()
    for at, (kind, i1, i2, j1, j2) in enumerate(blocks):
        if kind == "equal" or (kind == "replace" and i2 - i1 == j2 - j1):
            continue
        after = next(((i, j) for k, i, _, j, _ in blocks[at + 1 :] if k == "equal"), None)
        if after is None:
            return None  # the tail: one side is just further on
        if a[after[0]].step != b[after[1]].step:
            return None  # the same lines again, in another step
        longer_a = (i2 - i1) >= (j2 - j1)
        only = kind in ("insert", "delete") and not _moved(xs, ys, longer_a, i1, i2, j1, j2)
        return Shift("a" if longer_a else "b", *((i1, i2) if longer_a else (j1, j2)), only)
    return None


def _swapped(a: list[CallRecord], b: list[CallRecord]) -> bool:
    """Whether both sides issue the same calls, in another order, before any of these ends."""
    ours: Counter[object] = Counter()
    theirs: Counter[object] = Counter()
    for count, (m, n) in enumerate(zip(a, b, strict=False), 1):
        ours[m.what] += 1
        theirs[n.what] += 1
        if ours == theirs:
            return _at_once(a[:count]) and _at_once(b[:count])
    return False


def _at_once(made: list[CallRecord]) -> bool:
    """Whether every one of these calls had begun before the first one ended."""
    calls = [m.call for m in made if m.call is not None]
    last = max((c.began for c in calls), default=0.0)
    return len(calls) == len(made) and all(not c.ended or c.ended >= last for c in calls)


def _depth(place: CallRecord, others: list[CallRecord]) -> int:
    """How far up the stack of callers the lines differ; 0 where the innermost do, or none."""
    ours = place.site.places if place.site else ()
    for depth in range(len(ours)):
        here = place.location_at(depth)
        if any(m.location_at(depth) != here for m in others if m.index == place.index):
            return depth
    return 0


def _moved(
    xs: list[object], ys: list[object], longer_a: bool, i1: int, i2: int, j1: int, j2: int
) -> bool:
    """Whether what one side has more is made by the other as well, at another place near by."""
    if longer_a:
        return any(x in ys[j1 : j1 + 16] for x in xs[i1:i2])
    return any(y in xs[i1 : i1 + 16] for y in ys[j1:j2])


def _alike(a: list[CallRecord], b: list[CallRecord]) -> tuple[list[object], list[object]]:
    """Tokens of both sides; the arms of one `if` that stand for each other count as equal."""
    same: dict[object, object] = {}

    def token(m: CallRecord) -> object:
        found: object = (m.signature.op, m.text)
        while found in same:
            found = same[found]
        return found

    for m, n in zip(a, b, strict=False):
        x, y = token(m), token(n)
        heads = arms(m, n) if x != y else None
        if heads is None:
            continue
        ours = {token(o) for o in (*a, *b) if within(o, heads[0])}
        theirs = {token(o) for o in (*a, *b) if within(o, heads[1])}
        # `if r: f(a), f(b)` and `else: f(b), f(a)` are no alternatives but another order.
        if x not in theirs and y not in ours:
            same[y] = x
    return [token(m) for m in a], [token(n) for n in b]


def _harmless(a: list[CallRecord], b: list[CallRecord], shift: Shift, end: int) -> bool:
    """Barriers carry nothing that could get mixed up; but where other calls differ in the `end`
    because one side is that much behind, it is the barrier that is too many."""
    longer, shorter = (a, b) if shift.side == "a" else (b, a)
    if not all(m.signature.op in ("barrier", "DDP()") for m in longer[shift.start : shift.end]):
        return False
    behind = end - (shift.end - shift.start)
    if not shift.start <= behind < len(shorter) or end >= len(longer):
        return True
    ours, theirs = longer[end], shorter[behind]
    return (ours.signature.op, ours.text) != (theirs.signature.op, theirs.text)


def _fault(
    known: CallLogs,
    logs: dict[int, GroupCalls],
    index: int,
    a: list[CallRecord],
    b: list[CallRecord],
    one: list[int],
    other: list[int],
    shift: Shift | None,
    made: dict[int, CallRecord],
) -> tuple[CallRecord, tuple[int, ...]]:
    """The call to point at, and the ranks at fault."""
    if shift is not None:
        extra = (a if shift.side == "a" else b)[shift.start]
        callers = one if shift.side == "a" else other
        rest = other if shift.side == "a" else one
        if not shift.only_one_side and len(one) == len(other):
            for side, first in ((one, a[0]), (other, b[0])):
                if condition(first) is not None:
                    return first, tuple(sorted(side))
            return a[0], tuple(sorted(made))
        return extra, _minority(callers, rest, extra, known)
    x, y = a[0], b[0]
    if x.what[0] == y.what[0] and x.text == y.text:
        if len(one) < len(other) and 2 * len(other) >= len(made):
            return x, tuple(sorted(set(made) - set(other)))
        if len(one) + len(other) < len(made):
            return x, tuple(sorted(made))
        new = [_new(m, logs, known, index) for m in (x, y)]
        if new[0] != new[1]:
            return (x, tuple(sorted(one))) if new[0] else (y, tuple(sorted(other)))
        return x, tuple(sorted(made))
    odd_x, odd_y = (
        _oddness(x, y, logs[other[0]], known, index),
        _oddness(y, x, logs[one[0]], known, index),
    )
    if odd_x == odd_y and len(one) == len(other):
        often_x, often_y = (_often(m, logs, one + other, known, index) for m in (x, y))
        if max(often_x, often_y) < 2 * min(often_x, often_y) or often_x == often_y:
            return x, tuple(sorted(made))
        odd_y += often_y < often_x
    if odd_y > odd_x:
        return y, _minority(other, one, y, known)
    return x, _minority(one, other, x, known)


def _new(made: CallRecord, logs: dict[int, GroupCalls], known: CallLogs, index: int) -> bool:
    """Whether nobody passed these arguments on that line before."""
    start = max(0, index - WINDOW)
    return not any(
        m.text == made.text and m.what == made.what
        for log in list(logs.values())[:8]
        for m in known.window(log, start, index - start)
    )


def _oddness(
    made: CallRecord, other: CallRecord, others: GroupCalls, known: CallLogs, index: int
) -> int:
    """How much a call looks like the one that should not be there (or not alone)."""
    branches = condition(made) is not None or (avoided(made, other) and not arms(made, other))
    seen = any(
        m.text == made.text
        for m in known.window(others, max(0, index - WINDOW), min(index, WINDOW))
    )
    composite = made.signature.op.startswith("DDP")
    return 4 * branches + 2 * (not seen) + (branch(made) is not None) - composite


def _often(
    made: CallRecord, logs: dict[int, GroupCalls], ranks: list[int], known: CallLogs, index: int
) -> int:
    """How many times this call was made on these lines so far: what comes in every round is less
    odd than what comes now and then."""
    start = max(0, index - HISTORY)
    return sum(
        (m.what, m.text) == (made.what, made.text)
        for rank in ranks[:8]
        for m in known.window(logs[rank], start, index - start)
    )


def _minority(
    callers: list[int], rest: list[int], made: CallRecord, known: CallLogs
) -> tuple[int, ...]:
    if len(rest) < len(callers):
        return tuple(sorted(rest))
    return tuple(sorted(callers))


def describe_sides(divergence: CallDivergence) -> Iterator[tuple[list[int], CallRecord]]:
    """Who was in which call, the ranks at fault first."""
    sides = _sides(divergence.made, lambda m: (m.location, m.key))
    for side in sorted(sides, key=lambda s: s[0] not in divergence.culprits):
        yield side, divergence.made[side[0]]
