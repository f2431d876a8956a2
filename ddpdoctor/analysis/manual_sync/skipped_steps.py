"""Optimizer steps that some ranks skip, although all ranks synchronised the gradients manually."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...events import UnwrappedState
from ...report.findings import Steps
from ...run import ranks_text

SKIPPED = "skipped-step-manual-sync"

Rows = Mapping[int, UnwrappedState]
"""States of one moment, by rank."""


@dataclass(frozen=True)
class SkippedSteps:
    """Ranks that take a step after more all-reduces of gradients than others.

    Attributes:
        step: the first such step that was examined; -1 where only the end tells.
        elements: by rank, the elements communicated before it, but for those of the first step.
        taken: by rank, all steps in the end, where that is on record.
    """

    ranks: tuple[int, ...]
    step: int
    elements: dict[int, int]
    taken: dict[int, int]


def ahead(looks: Sequence[Rows], ends: Rows, size: int) -> SkippedSteps | None:
    """The ranks that have communicated at least the gradients of one more step than others by some
    step, and ever since; None where the ranks have not communicated equally much in the end, as
    they must, since collectives pair.

    Args:
        looks: states of all ranks, by ascending step.
        ends: the states at the end of the run, by rank.
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
    """The ranks that took fewer steps in the end and have different parameters, where all ranks
    have communicated equally much, the gradients of every step included."""
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


def fields(skipped: SkippedSteps, kind: str, steps: Steps | None) -> dict[str, Any]:
    """The fields of a finding about skipped steps; `steps`: at which the parameters differ."""
    who, at_end = ranks_text(skipped.ranks), skipped.step < 0
    taken = {n: {"steps": count} for n, count in skipped.taken.items()}
    summary = (
        f"{who} skipped an optimizer step of {kind}: step {skipped.step} follows more all-reduces "
        "of gradients there than on the other ranks"
    )
    if at_end:
        least, most = min(skipped.taken.values()), max(skipped.taken.values())
        summary = (
            f"{who} took {least} optimizer steps of {kind} for as many all-reduces of gradients as "
            f"the other ranks, which took {most}"
        )
    return {
        "rule": SKIPPED,
        "steps": None if at_end else steps,
        "ranks": skipped.ranks,
        "label": "skipped at least once, on some ranks only",
        "summary": summary,
        "cause": "all ranks synchronised the gradients manually, but not all of them applied them: "
        "the parameters differ by the missing updates",
        "fix": "take the step on every rank; if a step is to be skipped, decide it from values "
        "that are equal on all ranks (all-reduce the condition)",
        "evidence": {
            "communicated" + ("" if at_end else "_before_the_step"): [
                {"rank": n, "elements": count, **taken.get(n, {})}
                for n, count in skipped.elements.items()
            ],
        },
    }


def _more(look: Rows) -> dict[int, int]:
    """By rank, how many elements more it has communicated than the rank with the fewest."""
    least = min(s.elements for s in look.values())
    return {n: s.elements - least for n, s in look.items()}
