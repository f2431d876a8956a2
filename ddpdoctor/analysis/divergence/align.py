"""Where the calls of a group's ranks first differ: facts only, nobody is blamed here.

`suspects` says which side looks wrong, `explanations` who is at fault and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from ...events import CALLERS
from ...run import Location
from ..calls.call_logs import CallLogs, CallRecord, GroupCalls, GroupKey
from ..control_flow.branches import arms, called_apart, same_lines, within
from ..control_flow.jumps import Key, in_same_run
from .thresholds import NEAR_BY, WINDOW


@dataclass(frozen=True)
class CallDivergence:
    """A call of a group in which ranks differ, and in which they did not before.

    Attributes:
        calls: what each rank called there (only ranks with that call on record).
        differs: names of what differs (`op`, `numel`, `dtype`, ...); empty where only the lines
            do: the ranks make the same calls in a different order.
        shifted: the ranks' sequences are the same but for calls that only some make, or swapped.
        extra: one side makes a call that the other does not.
        side, rest: the ranks of the two sides compared; where `added` is known, `side` makes it.
        added: the first call that `side` makes and `rest` does not, or not there.
        elsewhere: the ranks are on different lines: it is not one call with other arguments.
        before: what each rank called just before.
        width: after how many calls they make the same ones again; 0 where that is not seen.
        again: the later calls in which they differ in the same way; variants: those of them in
            which the sides consist of other ranks.
        lacking: the names that `rest` lacks, of the loop over names in which `side` is.
        cut: up to which call they were examined, where there were too many; -1 otherwise.
    """

    key: GroupKey
    index: int
    calls: dict[int, CallRecord]
    differs: tuple[str, ...]
    shifted: bool
    extra: bool
    side: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    added: CallRecord | None = None
    elsewhere: bool = False
    before: tuple[CallRecord, ...] = ()
    width: int = 0
    again: tuple[int, ...] = ()
    variants: tuple[CallDivergence, ...] = ()
    lacking: tuple[str, ...] = ()
    cut: int = -1

    def may_be_left(self, still: CallRecord, loop: Key) -> bool:
        """Whether ranks may have left a loop in which another rank is.

        Not where all were outside of it in the call before, or entered it by other lines: then that
        rank has newly entered it. Nor where another thread makes a call.

        Args:
            still: the call of the rank in the loop.
        """
        if len({made.site.thread for made in self.calls.values() if made.site}) > 1:
            return False
        return not self.before or any(
            not _knows_all_of(made, loop[0], loop[2])
            or in_same_run(made.rank, made.site, still, loop)
            for made in self.before
        )

    def others(self, ranks: Collection[int]) -> list[CallRecord]:
        """The calls of all but these ranks."""
        return [made for rank, made in self.calls.items() if rank not in ranks]

    def depth(self, call: CallRecord) -> int:
        """How many callers up the line is that tells a call from those of the other side, where all
        go through one helper; 0 where the innermost line does, or none.

        For a loop over names it is the line of the loop.
        """
        if not self.differs and self.shifted and call.key:
            return call.arguments_depth
        rest = [m for m in self.calls.values() if m.index == call.index]
        for depth in range(len(call.site.places) if call.site else 0):
            here = call.location_at(depth)
            if any(m.location_at(depth) != here for m in rest):
                return depth
        return 0

    def location(self, call: CallRecord) -> Location | None:
        """The line to point at for a call of this divergence.

        For a helper that all ranks share, or that only these ranks are in: the line that called it.
        For a helper that passes on the arguments in which they differ: the line they come from.
        """
        depth = self.depth(call) or called_apart(call, self.calls.values())
        return call.location_at(depth or self.arguments_depth(call))

    def arguments_depth(self, call: CallRecord) -> int:
        """How many callers up the arguments come from, where all ranks are on the same lines."""
        one = self.same_call and len({made.text for made in self.calls.values()}) == 1
        return call.arguments_depth if one else 0

    @property
    def same_call(self) -> bool:
        """Whether it is the same call with different arguments."""
        return "op" not in self.differs and not self.shifted and not self.elsewhere

    def sides(self, first: Collection[int] = ()) -> Iterator[tuple[list[int], CallRecord]]:
        """The ranks on each line and their call; those with a rank of `first` come first."""
        sides = _sides(self.calls, lambda m: (m.location, m.key))
        for side in sorted(sides, key=lambda s: s[0] not in first):
            yield side, self.calls[side[0]]


def _knows_all_of(made: CallRecord, file: str, function: str) -> bool:
    """Whether the lines on record tell in which statements of a function a call is, if in any."""
    places = made.site.places if made.site else ()
    spots = (made.rank.location(place.site) for place in places)
    return 0 < len(places) < CALLERS or any(
        spot is not None and (spot.file, spot.function) == (file, function) for spot in spots
    )


_PARTS = ("op", "numel", "dtype", "device", "reduce_op", "root", "ranks")


def compare(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int, end: int
) -> CallDivergence | None:
    """The divergence at a call; None where the ranks do not diverge there.

    Args:
        index: the number of the call in the group.
        end: the first call in which more than the lines differs, -1 if there is none.
    """
    made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
    if unanswered := _unanswered(key, index, made):
        return unanswered
    sides = _sides(made)
    if len(sides) < 2:
        return None
    # The two largest sides stand for all: whatever else differs also differs from the larger one.
    side, rest = sides[1], sides[0]
    if index == end and (extra := _matched_with_next(known, key, logs, index, (side, rest))):
        return extra
    a = list(known.window(logs[side[0]], index, WINDOW))
    b = list(known.window(logs[rest[0]], index, WINDOW))
    differs = tuple(
        name
        for n, name in enumerate(_PARTS)
        if len({m.what[n] for m in made.values()}) > 1
    )  # fmt: skip
    if "op" in differs or of_several_models(made.values()):
        differs = ("op",)
    shift = _shift(a, b)
    if not differs and (shift is None or _harmless(a, b, shift, end - index)):
        return None
    swapped = bool(differs) and shift is None and _swapped(a, b)
    added = None
    if shift is not None:
        added = (a if shift.side == "a" else b)[shift.start]
        side, rest = (side, rest) if shift.side == "a" else (rest, side)
    return CallDivergence(
        key=key,
        index=index,
        calls=made,
        differs=() if swapped else differs,
        shifted=shift is not None or swapped,
        extra=shift is not None and shift.only_one_side,
        side=tuple(side),
        rest=tuple(rest),
        added=added,
        elsewhere=bool(differs) and a[0].text != b[0].text and arms(a[0], b[0]) is None,
        before=tuple(m for r in made if (m := known.at(logs[r], index - 1)) is not None),
    )


def _unanswered(key: GroupKey, index: int, made: dict[int, CallRecord]) -> CallDivergence | None:
    """A call of the program in `Join`, where ranks that are done answer those of torch only."""
    done = tuple(r for r, m in made.items() if m.site and m.site.shadows and m.site.internal)
    own = tuple(
        r
        for r, m in made.items()
        if m.site and not m.site.shadows and m.site.internal is False and not m.models
    )
    if not (done and own):
        return None
    added = made[own[0]]
    return CallDivergence(key, index, made, (), False, True, own, done, added)


def of_several_models(made: Iterable[CallRecord | None]) -> bool:
    """Whether these are the collectives of different DDP models, whose gradients would be mixed."""
    return len({tuple(m.models) for m in made if m is not None} - {()}) > 1


def _matched_with_next(
    known: CallLogs,
    key: GroupKey,
    logs: dict[int, GroupCalls],
    end: int,
    sides: tuple[list[int], list[int]],
) -> CallDivergence | None:
    """An extra call that was matched with the next one of its kind, so that the mismatch shows only
    at `end`; None where there is none.

    From the extra call on, its callers are one call behind: each time they make, on the same line,
    the call that the others made before.
    """
    for callers, rest in (sides, sides[::-1]):
        mine, theirs, index = logs[callers[0]], logs[rest[0]], end
        while index > max(0, end - WINDOW):
            now, before, there = (
                known.at(log, i)
                for log, i in ((mine, index), (mine, index - 1), (theirs, index - 1))
            )
            if now is None or before is None or there is None or not same_lines(now, there):
                break
            # A line of a library's function makes calls of all kinds.
            if now.signature.op != there.signature.op:
                break
            if same_lines(before, there) or arms(before, there) is not None:
                break
            index, added = index - 1, before
        if index < end:
            made = {r: m for r, log in logs.items() if (m := known.at(log, index)) is not None}
            two = (tuple(callers), tuple(rest))
            return CallDivergence(key, index, made, (), True, True, *two, added)
    return None


def _sides(
    made: dict[int, CallRecord], of: Callable[[CallRecord], object] = lambda m: None
) -> list[list[int]]:
    """Ranks that made the same call from lines that read the same, the largest side first.

    Args:
        of: what else has to be equal within a side.
    """
    sides: dict[object, list[int]] = {}
    hard = len({m.what for m in made.values()}) > 1
    for rank, m in made.items():
        sides.setdefault(m.what if hard else (m.what, m.text, of(m)), []).append(rank)
    return sorted(sides.values(), key=lambda s: (-len(s), s))


@dataclass(frozen=True)
class Shift:
    """How two sequences differ: calls `start` to `end` of `side`, which the other lacks there.

    Attributes:
        only_one_side: the other side does not make these calls at another place near by either.
    """

    side: str
    start: int
    end: int
    only_one_side: bool


def _shift(a: list[CallRecord], b: list[CallRecord]) -> Shift | None:
    """The first calls that one side has and the other does not; None where the calls only differ.

    `if rank == 0: broadcast(x) else: broadcast(y)` has different lines at the same numbers and is
    correct: nothing is inserted, nothing missing.
    """
    xs, ys = _tokens(a, b)
    blocks = SequenceMatcher(None, xs, ys, autojunk=False).get_opcodes()
    for at, (kind, i1, i2, j1, j2) in enumerate(blocks):
        if kind == "equal" or (kind == "replace" and i2 - i1 == j2 - j1):
            continue
        after = next(((i, j) for k, i, _, j, _ in blocks[at + 1 :] if k == "equal"), None)
        if after is None:
            return None  # the tail: one side is merely ahead
        if a[after[0]].step != b[after[1]].step:
            return None  # the same lines again, in another step
        longer_a = (i2 - i1) >= (j2 - j1)
        only = kind in ("insert", "delete") and not _moved(xs, ys, longer_a, i1, i2, j1, j2)
        return Shift("a" if longer_a else "b", *((i1, i2) if longer_a else (j1, j2)), only)
    return None


def _swapped(a: list[CallRecord], b: list[CallRecord]) -> bool:
    """Whether both sides issue the same calls in a different order before any of them returns."""
    ours: Counter[object] = Counter()
    theirs: Counter[object] = Counter()
    for count, (m, n) in enumerate(zip(a, b, strict=False), 1):
        ours[m.what] += 1
        theirs[n.what] += 1
        if ours == theirs:
            return _at_once(a[:count]) and _at_once(b[:count])
    return False


def _at_once(made: list[CallRecord]) -> bool:
    """Whether all of these calls were in flight at the same time."""
    calls = [m.call for m in made if m.call is not None]
    last = max((c.began for c in calls), default=0.0)
    return len(calls) == len(made) and all(not c.ended or c.ended >= last for c in calls)


def _moved(
    xs: list[object], ys: list[object], longer_a: bool, i1: int, i2: int, j1: int, j2: int
) -> bool:
    """Whether the other side makes the additional calls of one side, too, at a place near by."""
    if longer_a:
        return any(x in ys[j1 : j1 + NEAR_BY] for x in xs[i1:i2])
    return any(y in xs[i1 : i1 + NEAR_BY] for y in ys[j1:j2])


def _tokens(a: list[CallRecord], b: list[CallRecord]) -> tuple[list[object], list[object]]:
    """Tokens of both sides; corresponding branches of one `if` count as equal."""
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
        # `if r: f(a), f(b)` and `else: f(b), f(a)` do not correspond: it is a different order.
        if x not in theirs and y not in ours:
            same[y] = x
    return [token(m) for m in a], [token(n) for n in b]


def _harmless(a: list[CallRecord], b: list[CallRecord], shift: Shift, end: int) -> bool:
    """Whether only barriers are shifted, which carry no data that could get mixed up.

    Not where later calls differ because one side is behind by the same number of calls: then the
    barriers are extra.

    Args:
        end: after how many calls more than the lines differs.
    """
    longer, shorter = (a, b) if shift.side == "a" else (b, a)
    if not all(m.signature.op in ("barrier", "DDP()") for m in longer[shift.start : shift.end]):
        return False
    behind = end - (shift.end - shift.start)
    if not shift.start <= behind < len(shorter) or end >= len(longer):
        return True
    ours, theirs = longer[end], shorter[behind]
    return (ours.signature.op, ours.text) != (theirs.signature.op, theirs.text)
