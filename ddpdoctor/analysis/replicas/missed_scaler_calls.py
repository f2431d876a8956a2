"""Calls of `GradScaler.step` that some ranks omit while those of the others skip a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...events import ScalerStep
from ...report.findings import Steps


@dataclass(frozen=True)
class Call:
    """A call of `GradScaler.step`.

    Attributes:
        backwards: the synchronised backwards before it, which all ranks run together.
        number: of the call, among those of the rank.
        step: optimizer steps taken before it.
    """

    backwards: int
    number: int
    step: int
    scale: float
    skipped: bool
    site: int
    at: float


@dataclass(frozen=True)
class MissedScalerCalls:
    """A call that some ranks omitted, since which the loss scales differ.

    Attributes:
        ranks: who omitted the call.
        by, call: the call as another rank made it, which skipped the step.
        scales: by rank, at the next call that all ranks made.
        steps: at which the scales differ.
    """

    ranks: tuple[int, ...]
    by: int
    call: Call
    scales: dict[int, float]
    steps: Steps


def missed_call(
    events: Mapping[int, Sequence[ScalerStep]], ends: Mapping[int, int]
) -> MissedScalerCalls | None:
    """The call that some ranks omitted after a synchronised backward, while the others made it and
    skipped the step: only the scales of the others fell. None where it is not so.

    Args:
        events: of one scaler, by rank.
        ends: the last step of each rank.
    """
    if any(e.backwards < 0 or e.scale < 0 for mine in events.values() for e in mine):
        return None
    moments = sorted({b for mine in events.values() for e in mine for b in _around(e)})
    rows = [{n: c for n, m in events.items() if (c := _at(m, b))} for b in moments]
    skip = next((i for i, row in enumerate(rows) if row and len(row) < len(events)), None)
    if skip is None or not all(c.skipped for c in rows[skip].values()):
        return None
    by, call = next(iter(rows[skip].items()))
    whole = [row for row in rows if len(row) == len(events)]
    before = [r for r in whole if _moment(r) < call.backwards]
    after = [r for r in whole if _moment(r) > call.backwards]
    if not before or not after or not _scales_differ(after[0]):
        return None
    if any(_scales_differ(row) for row in before):
        return None
    ranks = tuple(n for n in events if n not in rows[skip])
    end = min(ends.values())
    begins = [row[by].step for row in after]
    spans = [
        range(step, max(step + 1, min(until, end + 1)))
        for row, step, until in zip(after, begins, [*begins[1:], end + 1], strict=True)
        if _scales_differ(row)
    ]
    steps = Steps(spans[0].start, spans[-1].stop - 1, sum(len(span) for span in spans))
    return MissedScalerCalls(ranks, by, call, {n: c.scale for n, c in after[0].items()}, steps)


def _around(event: ScalerStep) -> tuple[int, int]:
    """The synchronised backwards before a call, and before the next one if none is recorded."""
    return event.backwards, event.backwards + max(1, event.each)


def _at(events: Sequence[ScalerStep], backwards: int) -> Call | None:
    """The call after so many synchronised backwards: one that is not recorded is like the last
    recorded one, but did not skip its step. None where there is no call at that point."""
    place = bisect_right(events, backwards, key=lambda e: e.backwards) - 1
    if place < 0:
        return None
    last = events[place]
    calls, rest = divmod(backwards - last.backwards, last.each or 1)
    if rest or (calls and not last.each):
        return None
    reported = place + 1 < len(events)
    if reported and last.call + calls >= events[place + 1].call:
        return None
    step = last.step + calls - (last.skipped and calls > 0)
    skipped = last.skipped and not calls
    return Call(backwards, last.call + calls, step, last.scale, skipped, last.site, last.at)


def _moment(row: Mapping[int, Call]) -> int:
    return next(iter(row.values())).backwards


def _scales_differ(row: Mapping[int, Call]) -> bool:
    return len({c.scale for c in row.values()}) > 1
