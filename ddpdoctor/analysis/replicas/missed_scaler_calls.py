"""Calls of a scaler that some ranks leave out while those of the others skip a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...events import ScalerStep
from ...report.findings import Steps


@dataclass(frozen=True)
class Call:
    """A call by its moment: the averaging backwards before it; `number` is its own."""

    backwards: int
    number: int
    step: int
    scale: float
    skipped: bool
    site: int
    at: float


@dataclass(frozen=True)
class MissedScalerCalls:
    """Scales that part since.

    Attributes:
        ranks: who left the call out.
        by, call: what they left out, as this rank made it, which skipped the step.
        scales: by rank, at the next moment that all of them came to.
        steps: those with scales that differ.
    """

    ranks: tuple[int, ...]
    by: int
    call: Call
    scales: dict[int, float]
    steps: Steps


def left_out(
    events: Mapping[int, Sequence[ScalerStep]], ends: Mapping[int, int]
) -> MissedScalerCalls | None:
    """Whether gradients of one averaging backward are scaled differently, since some ranks have not
    called the scaler at a backward at which the others did and skipped the step: their scales fell.

    Args:
        events: of one scaler, by rank.
        ends: the last step of each.
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
    if not before or not after or any(_apart(row) for row in before) or not _apart(after[0]):
        return None
    ranks = tuple(n for n in events if n not in rows[skip])
    end = min(ends.values())
    begins = [row[by].step for row in after]
    spans = [
        range(step, max(step + 1, min(until, end + 1)))
        for row, step, until in zip(after, begins, [*begins[1:], end + 1], strict=True)
        if _apart(row)
    ]
    steps = Steps(spans[0].start, spans[-1].stop - 1, sum(len(span) for span in spans))
    return MissedScalerCalls(ranks, by, call, {n: c.scale for n, c in after[0].items()}, steps)


def _around(event: ScalerStep) -> tuple[int, int]:
    """The moment of a call, and of the next one, if there is none between."""
    return event.backwards, event.backwards + max(1, event.each)


def _at(events: Sequence[ScalerStep], backwards: int) -> Call | None:
    """The call after so many averaging backwards: one that is not told is like the last that was,
    and not skipped."""
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


def _apart(row: Mapping[int, Call]) -> bool:
    return len({c.scale for c in row.values()}) > 1
