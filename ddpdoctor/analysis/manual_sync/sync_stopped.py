"""Copies without a wrapper, kept equal by gradients that the program exchanges by hand, of which it
leaves some out from a step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...report.findings import Confidence, Severity
from ...run import Run, named
from . import kept_equal
from .kept_equal import Copies
from .never_synced import Look, close_looks, fields, layer_of, member, related, steady, verb

LOOKS_AT_LEAST = 2
"""Since they part."""


@dataclass(frozen=True)
class SyncStopped:
    """Parameters that were kept equal, and whose gradients are exchanged no more.

    Attributes:
        since: the first step whose gradients are not all exchanged; differ: the first before which
            the parameters are known to differ.
        positions: of these parameters.
    """

    copies: Copies
    since: int
    differ: int
    positions: list[int]


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings, of copies that nothing else is told of."""
    known = {_optimizer(found.copies) for found in kept_equal.partings(run)}
    for copies in kept_equal.trained_alike(run):
        apart = _optimizer(copies) not in known and steady(copies) and kept_equal.kept_equal(copies)
        if apart and (found := _dropped(copies)) is not None:
            yield _told(found)


def _optimizer(copies: Copies) -> int:
    return member(copies)[1].optimizer


def _dropped(copies: Copies) -> SyncStopped | None:
    """Where they part, for good, if all gradients were exchanged in every step up to one and in
    none since, and just those differ that are not exchanged: the others go on as before."""
    first = next((i for i, look in enumerate(copies.looks) if not kept_equal.same(look)), 0)
    later = copies.looks[first:]
    if not first or any(kept_equal.same(look) for look in later):
        return None
    whole = {s.completed for look in later for s in look.values()}
    if len(whole) > 1 or any(s.complete for look in later for s in look.values()):
        return None
    if any(s.completed != s.step for s in copies.looks[first - 1].values()):
        return None
    end = next(iter(later[0].values())).step
    looks = [look for look in close_looks(copies) if look.step >= end]
    every = range(len(member(copies)[1].parameters))
    positions = [i for i in every if all(_local(look, i) for look in looks)]
    others = [i for i in every if i not in positions]
    kept = all(_shared(look, i) for look in looks for i in others)
    known = len(looks) >= LOOKS_AT_LEAST and positions and others and kept
    return SyncStopped(copies, whole.pop(), end, positions) if known else None


def _local(look: Look, position: int) -> bool:
    """Whether each rank has its own gradient there, does not hand it over, and a value apart."""
    own = look.everywhere(position) and not look.agree(position)
    return own and position not in look.handed and not look.equal(position)


def _shared(look: Look, position: int) -> bool:
    """Clipping by a norm of all gradients sets those apart, too, that are exchanged."""
    agreed = look.equal(position) and look.agree(position)
    return agreed or all(position in own for own in look.own)


def _told(found: SyncStopped) -> dict[str, Any]:
    copies, local = found.copies, found.positions
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    layers = {layer_of(n) for i, n in enumerate(names) if i not in local} - {""}
    torn = any(layer_of(names[i]) in layers for i in local)
    site = copies.looks[0][rank.rank].exchange_site
    kind = event.kind or "a set of parameters"
    return fields(copies, found.differ) | {
        "severity": Severity.ERROR if torn else Severity.WARNING,
        "confidence": Confidence.PROVEN if torn else Confidence.SUSPECTED,
        "subjects": tuple(names[i] for i in local),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": f"leaves their gradients out from step {found.since} on",
        "related": related(rank, "made here", event.site),
        "summary": f"{named(names, local)} of {kind} {verb(local)} from step {found.differ} on: of "
        f"the gradients that the program exchanges by hand, theirs are left out since step "
        f"{found.since}",
        "cause": f"until then the gradients of all {len(names)} parameters were exchanged in every "
        f"step and kept the ranks equal; of {len(local)} they are not any more, and each rank "
        "applies its own to them"
        + ("" if torn else "; they are whole layers, so this may be meant (heads of their own)"),
        "fix": "exchange the gradient of every parameter that is trained; what is to be trained no "
        "longer needs `requires_grad_(False)` and `p.grad = None` on all ranks",
        "evidence": {
            "gradients not exchanged since step": found.since,
            "gradients left out": len(local),
            "gradients exchanged": len(names) - len(local),
        },
    }
