"""Parameters whose gradients nothing synchronises, beside others of the same model that stay equal:
an optimizer that exchanges gradients itself was given only some of them."""

from __future__ import annotations

import msgspec

from ddpdoctor.events import OptimizerSeen, Unwrapped, UnwrappedState
from ddpdoctor.findings import Finding
from ddpdoctor.run import Rank

from . import _models as models

LOOKS_AT_LEAST = 3


def named(told: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding:
    """The finding as one of these parameters, where something keeps the model's others equal."""
    kept = kept_equal(alike)
    if not kept:
        return told
    rank, event = next(iter(alike.items()))
    made = next((o for o in rank.of(OptimizerSeen) if o.optimizer == event.optimizer), None)
    place = rank.location(made.site) if made else None
    related = models.related(rank, (("stepped here", event.step_site),))
    few, theirs = len(event.parameters), "its" if len(event.parameters) == 1 else "their"
    are, these = ("is", "this one") if few == 1 else ("are", "these")
    return msgspec.structs.replace(
        told,
        location=place or told.location,
        label="no gradient is exchanged for this optimizer" if place else told.label,
        related=related if place else told.related,
        summary=f"{few} of the {few + kept} parameters of {event.kind} {are} trained {where}, and "
        f"nothing synchronises {theirs} gradients: they differ",
        cause=f"the other {kept} stay equal on all ranks, so that something synchronises them; the "
        f"gradients of {these} were given to no collective, and every rank applies its own",
        fix=f"average {theirs} gradients before the step as well: `dist.all_reduce(p.grad); "
        "p.grad /= dist.get_world_size()`, or give them to the optimizer that exchanges the others",
        evidence=told.evidence | {"parameters": f"{few} of {few + kept}"},
    )


def kept_equal(alike: dict[Rank, Unwrapped]) -> int:
    """How many others of the model are equal on these ranks at every look, under gradients that
    differ."""
    rank, event = next(iter(alike.items()))
    others = {
        e.optimizer: e
        for e in rank.of(Unwrapped)
        if e.root == event.root >= 0 and e.optimizer != event.optimizer
    }
    return sum(len(e.parameters) for number, e in others.items() if _equal(alike, number))


def _equal(ranks: dict[Rank, Unwrapped], optimizer: int) -> bool:
    rows = [
        {s.step: s for s in r.of(UnwrappedState) if s.optimizer == optimizer and not s.last}
        for r in ranks
    ]
    common = set.intersection(*map(set, rows))
    apart = any(len({row[n].gradients for row in rows}) > 1 for n in common)
    equal = all(len({row[n].parameters for row in rows}) == 1 for n in common)
    return len(common) >= LOOKS_AT_LEAST and apart and equal
