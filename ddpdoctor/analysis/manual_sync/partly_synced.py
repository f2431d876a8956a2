"""Parameters whose gradients nothing synchronises, while others of the same model stay equal: an
optimizer that communicates in its step leaves some out or was given only some, or hooks that
communicate in backward are missing on some."""

from __future__ import annotations

from math import prod

import msgspec

from ...events import OptimizerSeen, Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...report.findings import Finding
from ...run import Rank, plural
from ..models import wrapped_models as models

LOOKS_AT_LEAST = 3
ENOUGH = 0.5
"""Share of the elements of what stays equal that is communicated per step."""
NONE = 0
"""Digest of no gradient."""

Looks = list[list[UnwrappedState]]
"""The states of all ranks before the same steps, ascending."""


def left_out(found: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding restricted to the parameters that differ, where the optimizer's own step keeps
    others equal that get gradients which differ, and communicates enough for it.

    Args:
        found: that the model of these ranks is not synchronised.
        where: the ranks, as text (`on both ranks`).
    """
    rank, event = next(iter(alike.items()))
    looks = _close_looks(alike, event.optimizer)
    differ, kept = (
        _sorted(looks, len(event.parameters)) if len(looks) >= LOOKS_AT_LEAST else ([], [])
    )
    size = sum(prod(event.parameters[i].shape) for i in kept)
    if not differ or not kept or not _communicates(looks, size):
        return None
    these, their = _these(len(differ))
    spot = rank.location(event.step_site)
    calls = (("communicates the others", looks[-1][0].exchange_site), ("created here", event.site))
    return msgspec.structs.replace(
        found,
        subjects=tuple(event.parameters[i].name for i in differ),
        location=spot or found.location,
        label="does not synchronise some parameters" if spot else found.label,
        related=models.related(rank, calls) if spot else found.related,
        summary=_summary(len(differ), len(event.parameters), event.kind or "an optimizer", where),
        cause=f"{these} and {len(kept)} others start equal and get gradients that differ between "
        "ranks. The others stay equal, so the optimizer's step synchronises them; for "
        f"{these} every rank applies its own gradients",
        fix=f"all-reduce {their} gradients as well, in the optimizer's step or before it: "
        "`dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`",
        evidence={
            "parameters": f"{len(differ)} of {len(event.parameters)}",
            "parameters that stay equal": len(kept),
            "steps compared": [look[0].step for look in looks],
            "numbers exchanged since step 1": min(s.elements for s in looks[-1]),
        },
    )


def without_hooks(found: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding restricted to the parameters that differ, where backward communicates as many
    elements as the gradients of all others have, which are equal: hooks do that."""
    rank, event = next(iter(alike.items()))
    looks = _close_looks(alike, event.optimizer)
    if len(looks) < LOOKS_AT_LEAST:
        return None
    differ, kept = _by_gradients(looks, len(event.parameters))
    size = sum(prod(event.parameters[i].shape) for i in kept)
    if not differ or not kept or any(s.within != size for look in looks for s in look):
        return None
    _, their = _these(len(differ))
    calls = (
        ("communicates the others", looks[-1][0].exchange_site),
        ("applied here", event.step_site),
    )
    return msgspec.structs.replace(
        found,
        subjects=tuple(event.parameters[i].name for i in differ),
        label="some of its parameters have no hook",
        related=models.related(rank, calls),
        summary=_summary(len(differ), len(event.parameters), event.kind or "an optimizer", where),
        cause=f"collectives in backward carry the gradients of {len(kept)} other parameters, "
        f"which stay equal, but not {their} gradients: every rank applies its own",
        fix="register the hook for every parameter that requires a gradient, after the last one "
        "was added",
        evidence={
            "parameters": f"{len(differ)} of {len(event.parameters)}",
            "parameters that stay equal": len(kept),
            "steps compared": [look[0].step for look in looks],
            "numbers exchanged in each backward": size,
        },
    )


def _these(few: int) -> tuple[str, str]:
    """How a sentence refers to so many parameters, and to what belongs to them."""
    return plural(few, "this parameter", "these"), plural(few, "its", "their")


def _summary(few: int, every: int, kind: str, where: str) -> str:
    return (
        f"{few} of the {every} parameters of {kind} {plural(few, 'is', 'are')} trained {where}, "
        f"but nothing synchronises {plural(few, 'its gradients', 'their gradients')}, which differ"
    )


def _by_gradients(looks: Looks, count: int) -> tuple[list[int], list[int]]:
    """The positions of parameters that were equal before the first step and diverge for good, with
    gradients that differ at every look; and of those that are equal at every look, with equal
    gradients (empty if none of them moves)."""
    rows = [[unpack(s.each) for s in look] for look in looks]
    differ, kept, moved = [], [], False
    for i in range(count):
        gradients = [{row[i] for row in every} for every in rows]
        values = [{row[count + i] for row in every} for every in rows]
        equal = [len(v) == 1 for v in values]
        if all(len(g) == 1 and NONE not in g for g in gradients) and all(equal):
            kept.append(i)
            moved |= len(set.union(*values)) > 1
        elif equal[0] and not any(equal[1:]) and all(len(g) > 1 for g in gradients):
            differ.append(i)
    return differ, kept if moved else []


def _close_looks(alike: dict[Rank, Unwrapped], optimizer: int) -> Looks:
    """The looks for which every rank recorded one digest per parameter."""
    tables = [
        {s.step: s for s in r.of(UnwrappedState) if s.optimizer == optimizer and s.each}
        for r in alike
    ]
    common = sorted(set.intersection(*map(set, tables)))
    return [[table[step] for table in tables] for step in common]


def _sorted(looks: Looks, count: int) -> tuple[list[int], list[int]]:
    """Of parameters with gradients that differ: the positions of those that were equal before the
    first step and diverge for good, and of those that move and are equal at every look."""
    rows = [[unpack(s.each) for s in look] for look in looks]

    def values(position: int) -> list[set[int]]:
        return [{row[position] for row in every} for every in rows]

    differ, kept = [], []
    for i in range(count):
        equal = [len(v) == 1 for v in values(count + i)]
        if all(len(v) == 1 for v in values(i)[1:]):
            continue
        if all(equal):
            kept += [i] * (len(set.union(*values(count + i))) > 1)
        elif equal[0] and not any(equal[equal.index(False) :]):
            differ.append(i)
    return differ, kept


def _communicates(looks: Looks, size: int) -> bool:
    """Whether every step but the first communicates about `size` elements."""
    return all(
        s.elements >= ENOUGH * size * (s.step - 1) for look in looks for s in look if s.step > 1
    )


def named(found: Finding, alike: dict[Rank, Unwrapped], where: str) -> Finding | None:
    """The finding restricted to the parameters of one optimizer, where something keeps the other
    parameters of the model equal."""
    kept = kept_equal(alike)
    if not kept:
        return None
    rank, event = next(iter(alike.items()))
    made = next((o for o in rank.of(OptimizerSeen) if o.optimizer == event.optimizer), None)
    place = rank.location(made.site) if made else None
    related = models.related(rank, (("applied here", event.step_site),))
    few = len(event.parameters)
    these, their = _these(few)
    return msgspec.structs.replace(
        found,
        location=place or found.location,
        label="no gradients of this optimizer are synchronised" if place else found.label,
        related=related if place else found.related,
        summary=_summary(few, few + kept, event.kind, where),
        cause=f"the other {kept} stay equal on all ranks, so something synchronises them; the "
        f"gradients of {these} were passed to no collective, and every rank applies its own",
        fix=f"average {their} gradients before the step as well: `dist.all_reduce(p.grad); "
        f"p.grad /= dist.get_world_size()`, or give {plural(few, 'it', 'them')} to the optimizer "
        "that synchronises the others",
        evidence=found.evidence | {"parameters": f"{few} of {few + kept}"},
    )


def kept_equal(alike: dict[Rank, Unwrapped]) -> int:
    """How many other parameters of the model are equal on these ranks at every look, although their
    gradients differ."""
    rank, event = next(iter(alike.items()))
    others = {
        e.optimizer: e
        for e in rank.of(Unwrapped)
        if e.root == event.root >= 0 and e.optimizer != event.optimizer
    }
    return sum(len(e.parameters) for number, e in others.items() if _equal(alike, number))


def _equal(ranks: dict[Rank, Unwrapped], optimizer: int) -> bool:
    """Whether the parameters of an optimizer stay equal, although their gradients differ."""
    rows = [
        {s.step: s for s in r.of(UnwrappedState) if s.optimizer == optimizer and not s.last}
        for r in ranks
    ]
    common = set.intersection(*map(set, rows))
    differ = any(len({row[n].gradients for row in rows}) > 1 for n in common)
    equal = all(len({row[n].parameters for row in rows}) == 1 for n in common)
    return len(common) >= LOOKS_AT_LEAST and differ and equal
