"""Gradients of which copies are all-reduced, and that are applied unchanged: the result of the
all-reduce is not used."""

from __future__ import annotations

from typing import Any

import msgspec

from ...events import Unwrapped, UnwrappedState
from ...report.findings import Finding
from ...run import Rank, Run
from ..models import wrapped_models as models

LOOKS_AT_LEAST = 3
NEAR = 1e-3
"""Relative distance of two norms that count as equal. The average over ranks whose gradients differ
has a different norm."""


def found(run: Run, states: dict[Rank, dict[int, UnwrappedState]]) -> bool:
    """Whether at every look each rank had passed copies of its gradients to collectives (unchanged
    or divided by the world size), gradients still differ between ranks, and so do parameters, which
    were equal at most at the begin.

    Args:
        states: by rank and step.
    """
    tables = list(states.values())
    looks = [
        [table[step] for table in tables]
        for step, state in sorted(tables[0].items())
        if all(step in table for table in tables) and state.each
    ]
    if len(looks) < LOOKS_AT_LEAST:
        return False
    expected = (1.0, 1.0 / run.world_size)
    return all(
        len({s.gradients for s in look}) > 1
        and (look is looks[0] or len({s.parameters for s in look}) > 1)
        and all(any(abs(s.copied / e - 1) < NEAR for e in expected) for s in look)
        for look in looks
    )


def reported(finding: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding:
    """The finding restated: an all-reduce that changes nothing."""
    rank, event = next(iter(alike.items()))
    site = next((s.copied_site for s in _looks(rank, event.optimizer)), -1)
    kind = event.kind or "a set of parameters"
    changed: dict[str, Any] = {}
    if (spot := rank.location(site)) is not None:
        changed["location"] = spot
        changed["label"] = "reduces a copy, and the result is not used"
    return msgspec.structs.replace(
        finding,
        **changed,
        related=models.related(rank, (("applied here", event.step_site),)),
        summary=f"{kind} is trained {where}; copies of its gradients are all-reduced, but every "
        "rank applies its own, which differ",
        cause="the collective gets a copy of the gradients, and its result is not written back: "
        "in every examined step the gradients applied are those from before the all-reduce",
        fix="write the result back before the step: `p.grad.copy_(...)` for every parameter, or "
        "all-reduce `p.grad` itself",
        evidence=finding.evidence
        | {
            "ratio of norms, reduced copy to applied gradients": sorted(
                {round(s.copied, 4) for r in alike for s in _looks(r, event.optimizer)}
            ),
        },
    )


def _looks(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    """The states at which copies were seen."""
    return [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer and s.copied]
