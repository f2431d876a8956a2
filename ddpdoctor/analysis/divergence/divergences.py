"""All divergences of each group, in order, so that a harmless early one does not hide the one that
caused a hang."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from ...run import Run, State
from ..calls.call_logs import (
    CallLogs,
    CallRecord,
    GroupCalls,
    GroupKey,
    call_logs,
    first_difference,
)
from ..control_flow.branches import arms
from ..waiting.snapshot import snapshot_of
from .align import CallDivergence, compare, of_several_models
from .reordered_calls import lacking, reordered
from .thresholds import FAULTS, LOOKS, NEAR, REACH, TIMES, WINDOW

Marks = tuple[object, ...]


@lru_cache(maxsize=1)
def divergences(run: Run) -> tuple[CallDivergence, ...]:
    """The divergences of every group, in the order of its calls; each fault once."""
    known = call_logs(run)
    return tuple(
        divergence
        for key, logs in known.logs.items()
        if len(logs) > 1
        for divergence in _of_group(known, key, logs)
    )


def latest(divergence: CallDivergence, until: int) -> int:
    """The last call up to number `until` in which the ranks differed in this way; -1 for none."""
    return max((i for i in (divergence.index, *divergence.again) if i <= until), default=-1)


def got_past(run: Run, divergence: CallDivergence) -> bool:
    """Whether all ranks continued together after a divergence, so that what stops them later has
    another cause. Not known for calls on a device, which may only have been issued."""
    if not divergence.width:
        return False
    now = snapshot_of(run)
    reached = min(_reached(log, now.at) for log in now.known.logs[divergence.key].values())
    mine = latest(divergence, reached)
    others = (
        p for p in divergences(run) if p.key == divergence.key and p.index != divergence.index
    )
    if any(latest(other, reached) > mine for other in others):
        return True
    on_host = not divergence.key.on_device and all(
        m.signature.device in ("", "cpu") for m in divergence.calls.values()
    )
    return on_host and mine >= 0 and reached >= mine + divergence.width + NEAR


def _reached(log: GroupCalls, wall: float) -> int:
    """The number of the first call that a rank had not completed at a moment."""
    at = wall - log.rank.wall(0.0)
    undone = (
        call.index
        for call in (log.rank.ring.calls if log.rank.ring else ())
        if call.group == log.group
        and call.index >= 0
        and call.state is not State.VOID
        and (call.state is not State.DONE or call.ended > at)
    )
    return min(undone, default=log.issued)


def _of_group(known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls]) -> list[CallDivergence]:
    found: dict[object, CallDivergence] = {}
    judged: dict[Marks, CallDivergence | None] = {}
    start = 0
    for _ in range(TIMES):
        divergence = _next(known, key, logs, start, judged)
        if divergence is None:
            break
        texts = frozenset(m.text for m in divergence.calls.values())
        fault = texts, divergence.differs, divergence.shifted, divergence.extra
        if fault not in found and len(found) == FAULTS:
            break
        found[fault] = _joined(found[fault], divergence) if fault in found else divergence
        if not divergence.width:
            break
        start = divergence.index + divergence.width
    else:
        return [replace(d, cut=start) for d in found.values()]
    return list(found.values())


def _next(
    known: CallLogs,
    key: GroupKey,
    logs: dict[int, GroupCalls],
    start: int,
    judged: dict[Marks, CallDivergence | None],
) -> CallDivergence | None:
    """The first divergence from call `start` on.

    Args:
        judged: what was found before at calls with these marks; equal marks are not judged again.
    """
    found = _by_calls(known, key, logs, start, judged)
    until = found.index if found else None
    if earlier := _by_lines(known, key, logs, start, until, judged):
        return earlier
    return (found and lacking(known, key, logs, found.index)) or found


def _by_lines(
    known: CallLogs,
    key: GroupKey,
    logs: dict[int, GroupCalls],
    start: int,
    until: int | None,
    judged: dict[Marks, CallDivergence | None],
) -> CallDivergence | None:
    """The first divergence before call `until` that shows in the line numbers only."""
    first, *others = (logs[r] for r in sorted(logs))
    for _ in range(LOOKS):
        found = (first_difference(first, o, lambda s: s.places, start) for o in others)
        index = min((i for i in found if i is not None), default=None)
        if index is None or (until is not None and index >= until):
            break
        there = _there(known, logs, index)
        marks = tuple(m and (m.what, m.spots, m.key) for m in there)
        if marks not in judged:
            judged[marks] = (
                reordered(known, key, logs, index)
                or lacking(known, key, logs, index)
                or (_judged(known, key, logs, index, -1) if of_several_models(there) else None)
            )
        if (divergence := judged[marks]) is not None:
            return replace(divergence, index=index)
        start = index + 1
    return None


def _by_calls(
    known: CallLogs,
    key: GroupKey,
    logs: dict[int, GroupCalls],
    start: int,
    judged: dict[Marks, CallDivergence | None],
) -> CallDivergence | None:
    """The first divergence that shows in what is called, or in the text of the lines."""
    first, *others = (logs[r] for r in sorted(logs))
    hard = (first_difference(first, o, lambda s: s.whats, start) for o in others)
    soft = (first_difference(first, o, lambda s: s.tokens, start) for o in others)
    end = min((i for i in hard if i is not None), default=-1)
    # A swap of calls with equal arguments shows in their lines before it shows in anything else.
    places = {i for i in soft if i is not None and (i <= end or end < 0)}
    for index in sorted(places | ({end} if end >= 0 else set())):
        marks = _marks(known, logs, index)
        if marks not in judged:
            judged[marks] = _judged(known, key, logs, index, end)
        if (divergence := judged[marks]) is not None:
            return replace(divergence, index=index)
    return None


def _judged(
    known: CallLogs, key: GroupKey, logs: dict[int, GroupCalls], index: int, end: int
) -> CallDivergence | None:
    divergence = compare(known, key, logs, index, end)
    return divergence and replace(divergence, width=_width(known, logs, divergence))


def _marks(known: CallLogs, logs: dict[int, GroupCalls], index: int) -> Marks:
    """The lines of every rank's call, and which ranks' calls are equal."""
    made = _there(known, logs, index)
    whats: dict[object, int] = {}
    return tuple(
        (m.signature.op, m.text, whats.setdefault(m.what, len(whats))) if m else None for m in made
    )


def _there(known: CallLogs, logs: dict[int, GroupCalls], index: int) -> list[CallRecord | None]:
    return [known.recorded(log, index) for log in logs.values()]


def _joined(before: CallDivergence, divergence: CallDivergence) -> CallDivergence:
    """A divergence, with a later one of the same kind added."""
    known = (before, *before.variants)
    new = () if any(divergence.calls is one.calls for one in known) else (divergence,)
    return replace(
        before,
        again=(*before.again, divergence.index),
        variants=(*before.variants, *new),
        width=before.width if divergence.width else 0,
    )


def _width(known: CallLogs, logs: dict[int, GroupCalls], divergence: CallDivergence) -> int:
    """After how many calls the ranks make the same ones again; 0 where that is not seen.

    They do where all go on from one line, or one step, to the next with the same call: no rank is a
    call behind.
    """
    marks = zip(logs.values(), _marks(known, logs, divergence.index), strict=True)
    sides = list({mark: log for log, mark in marks if mark is not None}.values())
    after = 1 if not divergence.shifted else _swap(known, sides, divergence.index)
    first = divergence.index + after
    if divergence.extra or not after:
        return 0
    for index in range(first, first + REACH):
        here = [known.recorded(log, index) for log in sides]
        before = [known.recorded(log, index - 1) for log in sides]
        moved = [not _same_call(h, b) for h, b in zip(here, before, strict=True)]
        if any(moved):
            together = all(moved) and all(_same_call(here[0], h) for h in here[1:])
            return after if together else 0
    return 0


def _same_call(a: CallRecord | None, b: CallRecord | None) -> bool:
    if a is None or b is None:
        return False
    return a.step == b.step and (a.text == b.text or arms(a, b) is not None)


def _swap(known: CallLogs, sides: list[GroupCalls], first: int) -> int:
    """After how many calls all sides have made the same ones, in whatever order; 0 for never."""
    counts: list[Counter[object]] = [Counter() for _ in sides]
    for index in range(first, first + WINDOW):
        for log, count in zip(sides, counts, strict=True):
            made = known.recorded(log, index)
            if made is None:
                return 0
            count[made.what, made.text] += 1
        if all(count == counts[0] for count in counts[1:]):
            return index - first + 1
    return 0
