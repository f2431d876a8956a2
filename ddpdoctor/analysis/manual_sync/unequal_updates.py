"""Copies without a wrapper that begin equal and get equal gradients, to which a custom optimizer
applies updates that differ between ranks or are missing on some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...report.findings import Severity
from ...run import Run, counted, named, plural, ranks_text
from . import kept_equal, never_synced
from .copies import Copies, trained_copies
from .never_synced import Look

UNEQUAL_UPDATES = kept_equal.UNEQUAL_UPDATES
UPDATE_ON_SOME = "update-on-some-ranks"

RULES = {
    UNEQUAL_UPDATES: kept_equal.RULES[UNEQUAL_UPDATES],
    UPDATE_ON_SOME: "a custom optimizer updates parameters on some ranks only",
}


@dataclass(frozen=True)
class UnequalUpdates:
    """Parameters that differ although their gradients agree.

    Attributes:
        step: the first before which they differ.
        positions: of these parameters.
        kept: positions of the parameters that move and stay equal.
        still: the ranks on which none of `positions` has changed by then, while they have on
            others.
    """

    step: int
    positions: list[int]
    kept: list[int]
    still: tuple[int, ...]


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(_equal_gradients(never_synced.close_looks(c)) for c in trained_copies(run))


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for copies in trained_copies(run):
        if not kept_equal.kept_equal(copies) and (found := _diverged(copies)) is not None:
            yield _fields(copies, found)


def agree(looks: list[Look]) -> bool:
    """Whether every gradient is equal on all ranks at all looks, the first one before any step."""
    if len(looks) < never_synced.LOOKS_AT_LEAST or looks[0].step:
        return False
    return all(look.agree(i) for look in looks for i in range(len(look.gradients[0])))


def _equal_gradients(looks: list[Look]) -> list[int]:
    """The positions of parameters that begin equal and have a gradient before every step; empty
    where any gradient differs between ranks."""
    if not agree(looks):
        return []
    return [
        i
        for i in range(len(looks[0].gradients[0]))
        if looks[0].equal(i)
        and all(look.everywhere(i) for look in looks)
        and any(look.gradients[0][i] != never_synced.ALL_ZERO for look in looks)
    ]


def _diverged(copies: Copies) -> UnequalUpdates | None:
    """The parameters that differ for good, although gradients agree; None where there are none."""
    if any(s.running for look in copies.looks for s in look.values()):
        return None  # what is digested is not what is applied
    looks = never_synced.close_looks(copies)
    trained = _equal_gradients(looks)
    count = len(looks[0].parameters[0]) if looks else 0
    differ = [i for i in trained if not any(look.equal(i) for look in looks[-2:])]
    begins = {i: next(n for n, look in enumerate(looks) if not look.equal(i)) for i in differ}
    if any(look.equal(i) for i, n in begins.items() for look in looks[n:]):
        return None  # made equal again
    if any(not look.equal(i) for i in range(count) if i not in begins for look in looks):
        return None
    kept = [i for i in trained if i not in begins and never_synced.moved(looks, [i])]
    if not differ or not (kept or never_synced.steady(copies)):
        return None
    first = min(begins.values())
    positions = [i for i, n in begins.items() if n == first]
    before, after = (looks[n].parameters for n in (first - 1, first))
    still = tuple(
        n
        for n, old, new in zip(copies.members, before, after, strict=True)
        if all(old[i] == new[i] for i in positions)
    )
    return UnequalUpdates(looks[first].step, differ, kept, still)


def _fields(copies: Copies, found: UnequalUpdates) -> dict[str, Any]:
    rank, event = never_synced.member(copies)
    names = [p.name for p in event.parameters]
    shown = named(names, found.positions)
    them = plural(len(found.positions), "it", "them")
    they_were = plural(len(found.positions), "the parameter was", "the parameters were")
    if found.still:
        rule, ranks = UPDATE_ON_SOME, found.still
        verb = plural(len(ranks), "applies", "apply")
        cause = f"{ranks_text(ranks)} {verb} no update to {them}, the other ranks do"
        fix = (
            f"send {them} to all ranks after the update (`dist.broadcast`, `dist.all_gather`), or "
            "apply the update on every rank"
        )
    else:
        rule, ranks = UNEQUAL_UPDATES, tuple(copies.members)
        cause = f"the ranks apply different updates to {them}, or some ranks modify {them} "
        cause += "afterwards"
        fix = "compute the update on every rank from the same values, or on one rank and send it"
    return never_synced.fields(copies, found.step) | {
        "rule": rule,
        "severity": Severity.ERROR,
        "ranks": ranks,
        "subjects": tuple(names[i] for i in found.positions),
        "location": rank.location(event.step_site) or rank.location(event.site),
        "label": "applies updates that differ between ranks",
        "related": never_synced.related(rank, "created here", event.site),
        "summary": f"{shown} of {event.kind or 'a set of parameters'} "
        f"{never_synced.verb(found.positions)} from step {found.step} on, although the same "
        "gradients are applied",
        "cause": f"{they_were} equal before the first step, and gradients agree in every step; "
        f"{cause}"
        + (f"; the other {counted(len(found.kept), 'parameter')} stay equal" if found.kept else ""),
        "fix": fix,
        "evidence": {
            "gradients": "agree",
            "parameters_that_differ": len(found.positions),
            "parameters_that_stay_equal": len(found.kept),
            "steps_compared": [look.step for look in never_synced.close_looks(copies)],
        },
    }
