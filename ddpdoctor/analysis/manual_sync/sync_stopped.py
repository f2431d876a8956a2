"""Copies without a wrapper that were kept equal by manual synchronisation of gradients, which
leaves out some of them from a step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...report.findings import Confidence, Severity
from ...run import Run, named
from . import kept_equal
from .copies import Copies, same, trained_copies
from .kept_equal import SYNC_STOPPED
from .never_synced import (
    MEANT,
    Look,
    close_looks,
    fields,
    layer_of,
    member,
    related,
    steady,
    theirs,
    verb,
)

RULES = {SYNC_STOPPED: kept_equal.RULES[SYNC_STOPPED]}

LOOKS_AT_LEAST = 2
"""Looks that are required since the copies diverge."""


@dataclass(frozen=True)
class SyncStopped:
    """Parameters that were kept equal, and whose gradients are no longer synchronised.

    Attributes:
        since: the first step whose gradients are not all synchronised.
        differ: the first step before which the parameters are known to differ.
        positions: of these parameters.
    """

    copies: Copies
    since: int
    differ: int
    positions: list[int]


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings, of copies that `kept_equal` does not report."""
    known = {_optimizer(found.copies) for found in kept_equal.divergences(run)}
    for copies in trained_copies(run):
        if _optimizer(copies) in known or not (steady(copies) and kept_equal.kept_equal(copies)):
            continue
        if (found := _stopped(copies)) is not None:
            yield _fields(found)


def _optimizer(copies: Copies) -> int:
    return member(copies)[1].optimizer


def _stopped(copies: Copies) -> SyncStopped | None:
    """Where the copies diverge for good, if all gradients were synchronised in every step up to one
    and in none since, and just the parameters differ whose gradients no longer are."""
    first = next((i for i, look in enumerate(copies.looks) if not same(look)), 0)
    later = copies.looks[first:]
    if not first or any(same(look) for look in later):
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
    """Whether gradient and parameter differ between ranks, and the gradient is passed to no
    collective."""
    own = look.everywhere(position) and not look.agree(position)
    return own and position not in look.passed and not look.equal(position)


def _shared(look: Look, position: int) -> bool:
    """Whether a gradient is synchronised: clipping by a norm of all gradients makes also these
    differ, so either it agrees or every rank passes it to a collective."""
    agreed = look.equal(position) and look.agree(position)
    return agreed or all(position in own for own in look.own)


def _fields(found: SyncStopped) -> dict[str, Any]:
    copies, local = found.copies, found.positions
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    layers = {layer_of(n) for i, n in enumerate(names) if i not in local} - {""}
    torn = any(layer_of(names[i]) in layers for i in local)
    site = copies.looks[0][rank.rank].exchange_site
    kind = event.kind or "a set of parameters"
    return fields(copies, found.differ) | {
        "rule": SYNC_STOPPED,
        "severity": Severity.ERROR if torn else Severity.WARNING,
        "confidence": Confidence.PROVEN if torn else Confidence.SUSPECTED,
        "subjects": tuple(names[i] for i in local),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": f"no longer includes their gradients from step {found.since} on",
        "related": related(rank, "created here", event.site),
        "summary": f"{named(names, local)} of {kind} {verb(local)} from step {found.differ} on: "
        f"the program's own all-reduce no longer includes {theirs(local)} since step {found.since}",
        "cause": f"until then the gradients of all {len(names)} parameters were synchronised in "
        f"every step and kept the ranks equal; those of {len(local)} no longer are, and each rank "
        "applies its own" + ("" if torn else MEANT),
        "fix": "all-reduce the gradient of every parameter that is trained; for one that is no "
        "longer to be trained, set `requires_grad_(False)` and `p.grad = None` on all ranks",
        "evidence": {
            "gradients_not_synchronised_since_step": found.since,
            "gradients_not_synchronised": len(local),
            "gradients_synchronised": len(names) - len(local),
        },
    }
