"""An optimizer whose gradients manual synchronisation leaves out, while it includes those of
another optimizer of the same model in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...report.findings import FixKind, Related, Severity
from ...run import Run, counted, named
from . import never_synced
from .copies import Copies, same, trained_copies

NEVER_SYNCED_OPTIMIZER = "never-synced-optimizer"

RULES = {
    NEVER_SYNCED_OPTIMIZER: "manual synchronisation leaves out all parameters of one optimizer",
}


@dataclass(frozen=True)
class OtherOptimizer:
    """Two parts of one model, each in an optimizer of its own.

    Attributes:
        local: the part of which nothing is synchronised.
        shared: the part whose gradients are.
        differing: positions in `local` of what differs at the last look.
    """

    local: Copies
    shared: Copies
    differing: list[int]


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for found in _not_synced(run):
        yield _fields(found)


def _not_synced(run: Run) -> Iterator[OtherOptimizer]:
    every = list(trained_copies(run))
    steady = [c for c in every if never_synced.steady(c)]
    for local in every if steady else ():
        for shared in steady:
            if _one_model(local, shared) and _never_communicated(local):
                if differing := _differing(local, shared):
                    yield OtherOptimizer(local, shared, differing)
                break


def _one_model(some: Copies, others: Copies) -> bool:
    """Whether every rank has both parts in one module."""
    return some.members.keys() == others.members.keys() and all(
        event.root >= 0 and event.root == others.members[number][1].root
        for number, (_, event) in some.members.items()
    )


def _never_communicated(copies: Copies) -> bool:
    """Whether no collective carried gradients or parameters since the first step. Gathering the
    parameters after training does not count: it may serve to look at them."""
    first = copies.looks[0] if copies.looks else {}
    rows = [(n, s) for look in copies.looks for n, s in look.items()]
    kept = all(
        not (s.exchanged or s.late or s.shared) and s.averaged == first[n].averaged for n, s in rows
    )
    return kept and all(s.exchanged in ("", "gathered") for s in (copies.end or {}).values())


def _differing(local: Copies, shared: Copies) -> list[int]:
    """The positions that differ of a part that was equal before the first step, and never was
    again; empty where it is not so, or something may have synchronised it."""
    looks = never_synced.close_looks(local)
    if len(looks) < never_synced.LOOKS_AT_LEAST or looks[0].step or any(k.passed for k in looks):
        return []
    first, *later = local.looks
    ends = [local.end] if local.end else []
    if not same(first) or any(same(look) for look in [*later, *ends]):
        return []
    if not all(k.reported for k in looks) and not all(same(look) for look in shared.looks):
        return []
    trained = [
        i
        for i in range(len(never_synced.member(local)[1].parameters))
        if all(k.everywhere(i) for k in looks)
        and any(g[i] != never_synced.ALL_ZERO for k in looks for g in k.gradients)
    ]
    if any(all(k.agree(i) for k in looks) for i in trained):
        return []  # synchronised by means that were not seen
    if not any(
        not (any(k.agree(i) for k in looks) or any(k.equal(i) for k in looks[1:])) for i in trained
    ):
        return []
    return [i for i in trained if not looks[-1].equal(i)]


def _fields(found: OtherOptimizer) -> dict[str, Any]:
    rank, event = never_synced.member(found.local)
    others = [p.name for p in found.shared.members[rank.rank][1].parameters]
    names = [p.name for p in event.parameters]
    torn = sorted(
        {never_synced.layer_of(n) for n in names} & {never_synced.layer_of(n) for n in others}
    )
    torn = [layer for layer in torn if layer]
    meant = not torn and (_one_part(names, others) or _one_part(others, names))
    begin = found.local.looks[1][rank.rank].step
    exchange = rank.location(found.shared.looks[0][rank.rank].exchange_site)
    shown = named(names, found.differing)
    return never_synced.fields(found.local, begin) | {
        "rule": NEVER_SYNCED_OPTIMIZER,
        "severity": Severity.ERROR if torn else Severity.NOTE if meant else Severity.WARNING,
        "subjects": tuple(names[i] for i in found.differing),
        "location": rank.location(event.step_site) or exchange,
        "label": "applies gradients that are not synchronised",
        "related": (
            *((Related("does not include their gradients", exchange),) if exchange else ()),
            *never_synced.related(rank, "created here", event.site),
        ),
        "summary": f"{shown} of {event.kind} {never_synced.verb(found.differing)} from step "
        f"{begin} on: the program's own all-reduce includes no parameters of this optimizer",
        "cause": f"the gradients of {counted(len(others), 'parameter')} of {event.kind} in another "
        f"optimizer are synchronised in every step, those of the {len(names)} in this one never: "
        "each rank applies its own" + _remark(torn, meant),
        "fix": "all-reduce the gradients of both optimizers: `for p in model.parameters(): "
        "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`",
        "fix_kind": FixKind.CHECK,
        "evidence": {
            "gradients_synchronised": len(others),
            "gradients_not_synchronised": len(names),
            "parameters_that_differ_now": len(found.differing),
            "steps_compared": [next(iter(look.values())).step for look in found.local.looks][:20],
        },
    }


def _remark(torn: list[str], meant: bool) -> str:
    if torn:
        return f"; {torn[0]} has parameters in both"
    return "; they are a part of the model, so this may be intended (heads of their own)" * meant


def _one_part(names: list[str], others: list[str]) -> bool:
    """Whether these are all parameters of one module (or one parameter), which has none of the
    others."""
    paths = [name.split(".") for name in names]
    common = [
        parts[0] for parts in takewhile(lambda p: len(set(p)) == 1, zip(*paths, strict=False))
    ]
    return bool(common) and not any(n.split(".")[: len(common)] == common for n in others)
