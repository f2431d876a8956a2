"""Optimizer steps that some ranks leave out of those whose gradients all exchange by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...events import UnwrappedState
from ...report.findings import Steps
from ...run import ranks_do, ranks_text

Rows = Mapping[int, UnwrappedState]


@dataclass(frozen=True)
class SkippedSteps:
    """Ranks that take a step after more exchanges than others.

    Attributes:
        step: the first such step that was looked at; -1 where only the end tells.
        elements: by rank, the numbers exchanged before it, but for those of the first step.
        taken: by rank, all steps in the end, where that is on record.
    """

    ranks: tuple[int, ...]
    step: int
    elements: dict[int, int]
    taken: dict[int, int]


def ahead(looks: Sequence[Rows], ends: Rows, size: int) -> SkippedSteps | None:
    """Who has exchanged at least the gradients of one step more than others by a step, and ever
    since; None where they have not exchanged as much as the others in the end: collectives pair.

    Args:
        looks: those of all ranks, of ascending steps.
        ends: what is on record of the end, by rank.
        size: elements of the parameters.
    """
    whole = bool(looks) and ends.keys() == looks[0].keys()
    if whole and max(_more(ends).values()) >= size:
        return None
    more = [_more(look) for look in looks]
    first = next((i for i, extra in enumerate(more) if max(extra.values()) >= size), None)
    if not first:
        return None
    ranks = tuple(n for n, extra in more[first].items() if extra >= size)
    if any(later[n] < size for later in more[first:] for n in ranks):
        return None
    taken = {n: s.step for n, s in ends.items()} if whole else {}
    step = next(iter(looks[first].values())).step
    return SkippedSteps(ranks, step, {n: s.elements for n, s in looks[first].items()}, taken)


def in_the_end(looks: Sequence[Rows], ends: Rows, size: int) -> SkippedSteps | None:
    """Who took fewer steps in the end and has other parameters, where all have exchanged as much,
    the gradients of every step among it."""
    if not looks or ends.keys() != looks[0].keys():
        return None
    if len({s.parameters for s in ends.values()}) == 1:
        return None
    most = max(s.step for s in ends.values())
    ranks = tuple(n for n, s in ends.items() if s.step < most)
    if any(max(_more(look).values()) >= size for look in (looks[-1], ends)):
        return None
    if any(s.completed < s.step for s in ends.values()) or not ranks:
        return None
    elements = {n: s.elements for n, s in ends.items()}
    return SkippedSteps(ranks, -1, elements, {n: s.step for n, s in ends.items()})


def reported(by: SkippedSteps, kind: str, steps: Steps | None) -> dict[str, Any]:
    """Fields of a finding that they have in place of others."""
    taken = {n: {"steps": count} for n, count in by.taken.items()}
    more = f"step {by.step} comes after more exchanges of gradients than there"
    if by.step < 0:
        least, most = min(by.taken.values()), max(by.taken.values())
        more = f"{least} steps in as many exchanges of gradients, where the others take {most}"
    return {
        "steps": None if by.step < 0 else steps,
        "ranks": by.ranks,
        "label": f"left out on {ranks_text(by.ranks)} at least once",
        "summary": f"{ranks_do(by.ranks, 'skip')} optimizer steps of {kind} that the others take: "
        f"{more}",
        "cause": "the ranks exchanged the same gradients by hand, and not all of them applied "
        "them: their parameters are that many updates apart",
        "fix": "take the step on every rank; decide what to skip from numbers that are equal on "
        "all ranks (all-reduce the condition)",
        "evidence": {
            "exchanged" + ("_before_the_step" if by.step >= 0 else ""): [
                {"rank": n, "numbers": count, **taken.get(n, {})}
                for n, count in by.elements.items()
            ],
        },
    }


def _more(look: Rows) -> dict[int, int]:
    least = min(s.elements for s in look.values())
    return {n: s.elements - least for n, s in look.items()}
