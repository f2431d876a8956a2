"""Parameters whose gradients nothing synchronises, beside others of the same model that stay equal:
an optimizer that exchanges gradients itself was given only some of them, or leaves some out, or
hooks that do so in the backward are not on all of them."""

from __future__ import annotations

from math import prod

import msgspec

from ...events import OptimizerSeen, Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...report.findings import Finding
from ...run import Rank
from ..models import wrapped_models as models

LOOKS_AT_LEAST = 3
ENOUGH = 0.5
"""Share of what stays equal that is exchanged per step."""
NONE = 0
"""Digest of no gradient."""

Looks = list[list[UnwrappedState]]
"""What every rank saw before the same steps, ascending."""


def left_out(reported: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding as one of those that differ, where the optimizer's own step keeps others equal
    that get gradients which differ, and exchanges enough for it."""
    rank, event = next(iter(alike.items()))
    looks = _close_looks(alike, event.optimizer)
    apart, kept = (
        _sorted(looks, len(event.parameters)) if len(looks) >= LOOKS_AT_LEAST else ([], [])
    )
    size = sum(prod(event.parameters[i].shape) for i in kept)
    if not apart or not kept or not _exchanges(looks, size):
        return None
    names = tuple(event.parameters[i].name for i in apart)
    few, every = len(apart), len(event.parameters)
    are, these, their = ("is", "this one", "its") if few == 1 else ("are", "these", "their")
    spot = rank.location(event.step_site)
    calls = (("exchanges others here", looks[-1][0].exchange_site), ("made here", event.site))
    return msgspec.structs.replace(
        reported,
        subjects=names,
        location=spot or reported.location,
        label="leaves some as each rank has them" if spot else reported.label,
        related=models.related(rank, calls) if spot else reported.related,
        summary=f"{few} of the {every} parameters of {event.kind or 'an optimizer'} {are} trained "
        f"{where}, and nothing synchronises {their} gradients: they differ",
        cause=f"{these} and {len(kept)} others begin equal and get gradients that differ between "
        "ranks; the others stay equal, so that something exchanges theirs in the optimizer's step, "
        f"and {these} {'parts' if few == 1 else 'part'}: every rank applies its own",
        fix=f"exchange {their} gradients as well, in the optimizer's step or before it: "
        "`dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`",
        evidence={
            "parameters": f"{few} of {every}",
            "parameters that stay equal": len(kept),
            "steps compared": [look[0].step for look in looks],
            "numbers exchanged since step 1": min(s.elements for s in looks[-1]),
        },
    )


def without_hooks(reported: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding as one of those that differ, where the backward exchanges as many numbers as the
    gradients of all the others have, which are equal: hooks do that, and nothing else."""
    rank, event = next(iter(alike.items()))
    looks = _close_looks(alike, event.optimizer)
    if len(looks) < LOOKS_AT_LEAST:
        return None
    apart, kept = _by_gradients(looks, len(event.parameters))
    size = sum(prod(event.parameters[i].shape) for i in kept)
    if not apart or not kept or any(s.within != size for look in looks for s in look):
        return None
    few, every = len(apart), len(event.parameters)
    are, these, their = ("is", "this one", "its") if few == 1 else ("are", "these", "their")
    calls = (
        ("exchanges others here", looks[-1][0].exchange_site),
        ("stepped here", event.step_site),
    )
    return msgspec.structs.replace(
        reported,
        subjects=tuple(event.parameters[i].name for i in apart),
        label="some of its parameters have no hook",
        related=models.related(rank, calls),
        summary=f"{few} of the {every} parameters of {event.kind or 'an optimizer'} {are} trained "
        f"{where}, and nothing synchronises {their} gradients: they differ",
        cause=f"collectives in the backward carry the gradients of {len(kept)} others, which stay "
        f"equal, and nothing of {these}: every rank applies its own",
        fix=f"exchange {their} gradients as well: register the hook for every parameter that "
        "requires a gradient, after the last one was added",
        evidence={
            "parameters": f"{few} of {every}",
            "parameters that stay equal": len(kept),
            "steps compared": [look[0].step for look in looks],
            "numbers exchanged in each backward": size,
        },
    )


def _by_gradients(looks: Looks, count: int) -> tuple[list[int], list[int]]:
    """Positions of those that were equal before the first step and part for good, with gradients
    that differ at every look; and of those that are equal at every look, with equal gradients,
    where some of them move."""
    rows = [[unpack(s.each) for s in look] for look in looks]
    apart, kept, moved = [], [], False
    for i in range(count):
        gradients = [{row[i] for row in every} for every in rows]
        values = [{row[count + i] for row in every} for every in rows]
        equal = [len(v) == 1 for v in values]
        if all(len(g) == 1 and NONE not in g for g in gradients) and all(equal):
            kept.append(i)
            moved |= len(set.union(*values)) > 1
        elif equal[0] and not any(equal[1:]) and all(len(g) > 1 for g in gradients):
            apart.append(i)
    return apart, kept if moved else []


def _close_looks(alike: dict[Rank, Unwrapped], optimizer: int) -> Looks:
    """Those of which all digests are told one by one."""
    tables = [
        {s.step: s for s in r.of(UnwrappedState) if s.optimizer == optimizer and s.each}
        for r in alike
    ]
    common = sorted(set.intersection(*map(set, tables)))
    return [[table[step] for table in tables] for step in common]


def _sorted(looks: Looks, count: int) -> tuple[list[int], list[int]]:
    """Under gradients that differ: positions of those that were equal before the first step and
    part for good; and of those that move and are equal at every look."""
    rows = [[unpack(s.each) for s in look] for look in looks]

    def values(position: int) -> list[set[int]]:
        return [{row[position] for row in every} for every in rows]

    apart, kept = [], []
    for i in range(count):
        equal = [len(v) == 1 for v in values(count + i)]
        if all(len(v) == 1 for v in values(i)[1:]):
            continue
        if all(equal):
            kept += [i] * (len(set.union(*values(count + i))) > 1)
        elif equal[0] and not any(equal[equal.index(False) :]):
            apart.append(i)
    return apart, kept


def _exchanges(looks: Looks, size: int) -> bool:
    """Whether every step but the first exchanges about as much as that."""
    return all(
        s.elements >= ENOUGH * size * (s.step - 1) for look in looks for s in look if s.step > 1
    )


def named(reported: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding as one of these parameters, where something keeps the model's others equal."""
    kept = kept_equal(alike)
    if not kept:
        return None
    rank, event = next(iter(alike.items()))
    made = next((o for o in rank.of(OptimizerSeen) if o.optimizer == event.optimizer), None)
    place = rank.location(made.site) if made else None
    related = models.related(rank, (("stepped here", event.step_site),))
    few, theirs = len(event.parameters), "its" if len(event.parameters) == 1 else "their"
    are, these = ("is", "this one") if few == 1 else ("are", "these")
    return msgspec.structs.replace(
        reported,
        location=place or reported.location,
        label="no gradient is exchanged for this optimizer" if place else reported.label,
        related=related if place else reported.related,
        summary=f"{few} of the {few + kept} parameters of {event.kind} {are} trained {where}, and "
        f"nothing synchronises {theirs} gradients: they differ",
        cause=f"the other {kept} stay equal on all ranks, so that something synchronises them; the "
        f"gradients of {these} were given to no collective, and every rank applies its own",
        fix=f"average {theirs} gradients before the step as well: `dist.all_reduce(p.grad); "
        "p.grad /= dist.get_world_size()`, or give them to the optimizer that exchanges the others",
        evidence=reported.evidence | {"parameters": f"{few} of {few + kept}"},
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
