"""An optimizer whose gradients the exchange by hand leaves out, while it carries those of another
optimizer of the same model in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ...report.findings import FixKind, Related, Severity
from ...run import Run, named
from . import kept_equal, never_synced
from .kept_equal import Copies


@dataclass(frozen=True)
class OtherOptimizer:
    """Two parts of one model, each in an optimizer of its own.

    Attributes:
        local: the part of which nothing is exchanged, `shared` the one whose gradients are.
        apart: positions in `local` of what differs at the last look.
    """

    local: Copies
    shared: Copies
    apart: list[int]


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for beside in _beside(run):
        yield _told(beside)


def _beside(run: Run) -> Iterator[OtherOptimizer]:
    every = list(kept_equal.trained_alike(run))
    steady = [c for c in every if never_synced.steady(c)]
    for local in every if steady else ():
        for shared in steady:
            if _one_model(local, shared) and _never_exchanged(local):
                if apart := _apart(local, shared):
                    yield OtherOptimizer(local, shared, apart)
                break


def _one_model(some: Copies, others: Copies) -> bool:
    """Whether every rank has both in one module."""
    return some.members.keys() == others.members.keys() and all(
        event.root >= 0 and event.root == others.members[number][1].root
        for number, (_, event) in some.members.items()
    )


def _never_exchanged(copies: Copies) -> bool:
    """Whether no collective carried gradients or parameters since the first step. Who gathers the
    parameters when training is over may only look at them."""
    first = copies.looks[0] if copies.looks else {}
    rows = [(n, s) for look in copies.looks for n, s in look.items()]
    kept = all(
        not (s.exchanged or s.late or s.shared) and s.averaged == first[n].averaged for n, s in rows
    )
    return kept and all(s.exchanged in ("", "gathered") for s in (copies.end or {}).values())


def _apart(local: Copies, shared: Copies) -> list[int]:
    """What differs of a part that was equal before the first step, and never was again."""
    looks = never_synced.close_looks(local)
    if len(looks) < never_synced.LOOKS_AT_LEAST or looks[0].step or any(k.handed for k in looks):
        return []
    first, *later = local.looks
    ends = [local.end] if local.end else []
    if not kept_equal.same(first) or any(kept_equal.same(look) for look in [*later, *ends]):
        return []
    if not all(k.reported for k in looks) and not all(
        kept_equal.same(look) for look in shared.looks
    ):
        return []
    trained = [
        i
        for i in range(len(never_synced.member(local)[1].parameters))
        if all(k.everywhere(i) for k in looks)
        and any(g[i] != never_synced.ALL_ZERO for k in looks for g in k.gradients)
    ]
    if any(all(k.agree(i) for k in looks) for i in trained):
        return []  # exchanged by means that were not seen
    if not any(
        not (any(k.agree(i) for k in looks) or any(k.equal(i) for k in looks[1:])) for i in trained
    ):
        return []
    return [i for i in trained if not looks[-1].equal(i)]


def _told(found: OtherOptimizer) -> dict[str, Any]:
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
    shown = named(names, found.apart)
    return never_synced.fields(found.local, begin) | {
        "severity": Severity.ERROR if torn else Severity.NOTE if meant else Severity.WARNING,
        "subjects": tuple(names[i] for i in found.apart),
        "location": rank.location(event.step_site) or exchange,
        "label": "applies gradients that were not exchanged",
        "related": (
            *((Related("leaves their gradients out", exchange),) if exchange is not None else ()),
            *never_synced.related(rank, "made here", event.site),
        ),
        "summary": f"{shown} of {event.kind} {never_synced.verb(found.apart)} from step {begin} "
        "on: the exchange by hand leaves all parameters of this optimizer out",
        "cause": f"the gradients of the {len(others)} parameters of {event.kind} in another "
        f"optimizer are exchanged in every step, those of the {len(names)} in this one never: each "
        "rank applies its own to them" + _remark(torn, meant),
        "fix": "exchange the gradients of both optimizers: `for p in model.parameters(): "
        "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`",
        "fix_kind": FixKind.CHECK,
        "evidence": {
            "gradients exchanged": len(others),
            "gradients left out": len(names),
            "parameters that differ now": len(found.apart),
            "steps compared": [next(iter(look.values())).step for look in found.local.looks][:20],
        },
    }


def _remark(torn: list[str], meant: bool) -> str:
    if torn:
        return f"; {torn[0]} has parameters in both"
    return "; they are a part of the model, so this may be meant (heads of their own)" * meant


def _one_part(names: list[str], others: list[str]) -> bool:
    """Whether these are all in one module, or one parameter, that has none of the others."""
    paths = [name.split(".") for name in names]
    common = [
        parts[0] for parts in takewhile(lambda p: len(set(p)) == 1, zip(*paths, strict=False))
    ]
    return bool(common) and not any(n.split(".")[: len(common)] == common for n in others)
