"""Backwards that ranks lack of those that average, because a step of theirs did without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...report.findings import Finding
from ...run import unfolded
from .gradient_patterns import Span, patterns
from .replica import Member

BACKWARD = "DDP backward"


class MissedBackwards:
    """Of the copies of one model: what each rank lacks at a step."""

    def __init__(self, members: Mapping[int, Member]) -> None:
        spans = {n: list(patterns(m)) for n, m in members.items()}
        every = [s for found in spans.values() for s in found]
        self._short = {n: list(_short(found, every)) for n, found in spans.items()}

    def __bool__(self) -> bool:
        return any(self._short.values())

    def at(self, number: int, step: int) -> int:
        """Backwards that rank `number` has left out up to this step."""
        return sum(
            (min(span.last, step) - span.first + 1) * each
            for span, each in self._short[number]
            if span.first <= step
        )


def _short(mine: Sequence[Span], every: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """The spans that average less often than this rank, or another one, does otherwise."""
    whole = [s for s in mine if not s.pattern.reason] or [s for s in every if not s.pattern.reason]
    if not whole:
        return
    for span in mine:
        if span.pattern.reason:
            usual = min(whole, key=lambda s: abs(s.first - span.first)).pattern.synced
            if usual > span.pattern.synced:
                yield span, usual - span.pattern.synced


def parts_them(mine: Finding, other: Finding) -> bool:
    """Whether ranks are in different calls, or one leaves while others wait, only because those
    that are ahead lack the averaging backwards of the steps that `mine` tells of."""
    lacks = str(mine.evidence.get("backwards_before_the_step", ""))
    if mine.steps is None or not lacks.startswith(("0 averaged", "none")):
        return False
    ahead, waiting = _sides(other)
    whole = set(ahead) <= set(mine.ranks) and set(mine.ranks).isdisjoint(waiting)
    if not ahead or not waiting or not whole:
        return False
    least, count = min(waiting.values()), mine.steps.count
    lead = {step - behind for step in ahead.values() for behind in waiting.values()}
    # A rank that is in the middle of a round has not stepped in it.
    fewest = count - 1 if other.evidence.get("stuck") else 0
    return least >= mine.steps.first and all(fewest <= n <= count for n in lead)


def _sides(other: Finding) -> tuple[dict[int, int], dict[int, int]]:
    """Optimizer steps of the ranks that are ahead, and of those in a backward of DDP."""
    ahead: dict[int, int] = {}
    waiting: dict[int, int] = {}
    calls, steps = other.evidence.get("calls"), other.evidence.get("steps")
    if other.check == "collective-mismatch" and isinstance(calls, list):
        for side in calls:
            into = waiting if side["call"].startswith(BACKWARD) else ahead
            into.update(dict.fromkeys(unfolded(side["ranks"]), side.get("step", -1)))
    elif other.check == "rank-exited-early" and other.subjects == (BACKWARD,):
        reported = other.evidence.get("left")
        left = unfolded(reported) if isinstance(reported, str) else {*other.ranks}
        for number, count in steps.items() if isinstance(steps, dict) else ():
            (ahead if int(number) in left else waiting)[int(number)] = count
    return ahead, waiting
