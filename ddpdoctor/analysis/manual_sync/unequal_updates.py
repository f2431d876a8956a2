"""Copies without a wrapper that begin equal and get equal gradients, and to which an optimizer of
the program's own applies updates that differ, or that not all ranks get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...report.findings import Severity
from ...run import Run, named, ranks_text
from . import kept_equal, never_synced
from .kept_equal import Copies
from .never_synced import Look


@dataclass(frozen=True)
class UnequalUpdates:
    """Positions of parameters that differ from `step` on, of which the gradients agree.

    Attributes:
        kept: positions of those that move and stay equal.
        still: ranks on which none of the parted ones has changed by then, while they have on the
            others.
    """

    step: int
    positions: list[int]
    kept: list[int]
    still: tuple[int, ...]


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(_equal_gradients(never_synced.close_looks(c)) for c in kept_equal.trained_alike(run))


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for copies in kept_equal.trained_alike(run):
        if not kept_equal.kept_equal(copies) and (found := _parted(copies)) is not None:
            yield _told(copies, found)


def agree(looks: list[Look]) -> bool:
    """Whether every gradient is the same on all ranks at all looks, of which the first is before
    any step."""
    if len(looks) < never_synced.LOOKS_AT_LEAST or looks[0].step:
        return False
    return all(look.agree(i) for look in looks for i in range(len(look.gradients[0])))


def _equal_gradients(looks: list[Look]) -> list[int]:
    """Positions of parameters that begin equal and have a gradient before every step that is the
    same on all ranks; empty where any gradient is another one on some rank."""
    if not agree(looks):
        return []
    return [
        i
        for i in range(len(looks[0].gradients[0]))
        if looks[0].equal(i)
        and all(look.everywhere(i) for look in looks)
        and any(look.gradients[0][i] != never_synced.ALL_ZERO for look in looks)
    ]


def _parted(copies: Copies) -> UnequalUpdates | None:
    if any(s.running for look in copies.looks for s in look.values()):
        return None  # what is digested is not what is applied
    looks = never_synced.close_looks(copies)
    trained = _equal_gradients(looks)
    count = len(looks[0].parameters[0]) if looks else 0
    parted = [i for i in trained if not any(look.equal(i) for look in looks[-2:])]
    begins = {i: next(n for n, look in enumerate(looks) if not look.equal(i)) for i in parted}
    if any(look.equal(i) for i, n in begins.items() for look in looks[n:]):
        return None  # made equal again
    if any(not look.equal(i) for i in range(count) if i not in begins for look in looks):
        return None
    kept = [i for i in trained if i not in begins and never_synced.moved(looks, [i])]
    if not parted or not (kept or never_synced.steady(copies)):
        return None
    first = min(begins.values())
    positions = [i for i, n in begins.items() if n == first]
    before, after = (looks[n].parameters for n in (first - 1, first))
    still = tuple(
        n
        for n, old, new in zip(copies.members, before, after, strict=True)
        if all(old[i] == new[i] for i in positions)
    )
    return UnequalUpdates(looks[first].step, parted, kept, still)


def _told(copies: Copies, found: UnequalUpdates) -> dict[str, Any]:
    rank, event = never_synced.member(copies)
    names = [p.name for p in event.parameters]
    shown = named(names, found.positions)
    them = "it" if len(found.positions) == 1 else "them"
    if found.still:
        odd = found.still
        verb = "applies" if len(odd) == 1 else "apply"
        cause = f"{ranks_text(odd)} {verb} no update to {them}, the others do"
        fix = (
            f"send {them} to all ranks after the update (`dist.broadcast`, `dist.all_gather`), or "
            "apply the update on every rank"
        )
    else:
        odd = tuple(copies.members)
        cause = f"what the ranks apply to {them} differs, or some of them edit {them} afterwards"
        fix = "compute the update on every rank from the same numbers, or on one and send it"
    return never_synced.fields(copies, found.step) | {
        "severity": Severity.ERROR,
        "ranks": odd,
        "subjects": tuple(names[i] for i in found.positions),
        "location": rank.location(event.step_site) or rank.location(event.site),
        "label": "applies updates that differ between ranks",
        "related": never_synced.related(rank, "made here", event.site),
        "summary": f"{shown} of {event.kind or 'a set of parameters'} "
        f"{never_synced.verb(found.positions)} from step {found.step} on, although the same "
        "gradients are applied",
        "cause": f"they were equal before the first step and gradients agree in every step; {cause}"
        + (f"; the other {len(found.kept)} parameters stay equal" if found.kept else ""),
        "fix": fix,
        "evidence": {
            "gradients": "agree",
            "parameters that differ": len(found.positions),
            "parameters that stay equal": len(found.kept),
            "steps compared": [look.step for look in never_synced.close_looks(copies)],
        },
    }
