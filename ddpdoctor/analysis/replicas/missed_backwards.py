"""Synchronised backwards that a rank missed because one of its steps was not synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...report.evidence_names import STEPS_TAKEN
from ...report.findings import Finding
from .gradient_patterns import Span, patterns
from .replica import Member

BACKWARD = "DDP backward"
"""What a backward of DDP is called among the subjects of findings about collectives."""

SYNCED = "synchronised_backwards_before_the_step"
"""Evidence of `unsynced-step`: how many (a number)."""


class MissedBackwards:
    """How many synchronised backwards each copy of one model has missed by a step."""

    def __init__(self, members: Mapping[int, Member]) -> None:
        spans = {n: list(patterns(m)) for n, m in members.items()}
        every = [s for found in spans.values() for s in found]
        self._short = {n: list(_short(found, every)) for n, found in spans.items()}

    def __bool__(self) -> bool:
        return any(self._short.values())

    def at(self, number: int, step: int) -> int:
        """How many rank `number` has missed up to this step."""
        return sum(
            (min(span.last, step) - span.first + 1) * each
            for span, each in self._short[number]
            if span.first <= step
        )


def _short(mine: Sequence[Span], every: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """The spans with fewer synchronised backwards per step than this rank, or another one, runs
    otherwise; and how many fewer."""
    whole = [s for s in mine if not s.pattern.reason] or [s for s in every if not s.pattern.reason]
    if not whole:
        return
    for span in mine:
        if span.pattern.reason:
            usual = min(whole, key=lambda s: abs(s.first - span.first)).pattern.synced
            if usual > span.pattern.synced:
                yield span, usual - span.pattern.synced


def puts_ahead(mine: Finding, other: Finding) -> bool:
    """Whether `other` (ranks in different collectives, or a rank that leaves while others wait)
    only shows that some ranks are ahead by the synchronised backwards that `mine` says they missed.
    """
    if mine.steps is None or mine.evidence.get(SYNCED) != 0:
        return False
    ahead, waiting = _sides(mine, other)
    if not ahead or not waiting:
        return False
    count = mine.steps.count
    lead = {step - behind for step in ahead.values() for behind in waiting.values()}
    # A rank that hangs in the middle of a round has not taken the step of that round.
    fewest = count - 1 if other.deadlocked else 0
    return min(waiting.values()) >= mine.steps.first and all(fewest <= n <= count for n in lead)


def _sides(mine: Finding, other: Finding) -> tuple[dict[int, int], dict[int, int]]:
    """The optimizer steps of the ranks that missed backwards, and of the others, which wait in a
    backward of DDP; empty where `other` is not of that kind."""
    mismatch = other.check == "collective-mismatch" and BACKWARD in other.subjects
    if not mismatch and not (other.check == "rank-exited-early" and other.subjects == (BACKWARD,)):
        return {}, {}
    steps = other.evidence.get(STEPS_TAKEN)
    taken = {int(n): count for n, count in steps.items()} if isinstance(steps, dict) else {}
    ahead = {n: count for n, count in taken.items() if n in mine.ranks}
    if other.check == "rank-exited-early" and ahead.keys() != {*other.ranks}:
        return {}, {}  # others left, or not all of these
    return ahead, {n: count for n, count in taken.items() if n not in ahead}
