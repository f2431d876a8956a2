"""Parameters that the optimizers of some ranks hold and those of others do not, where nothing
brings the holders' updates to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdoctor.events import Ownership, Replica, StepDone, Wrapped
from ddpdoctor.events.pack import unpack
from ddpdoctor.findings import FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, ranks_text

from . import _causes, _replicas
from ._replicas import Member

Key = tuple[tuple[int, ...], int]
"""Ranks of the group, and the model's number."""


def compared(run: Run) -> bool:
    """Whether there is something to tell."""
    return any(told(run))


def told(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    members: dict[Key, list[Member]] = {}
    for rank in run.ranks.values():
        wrapped = {w.model: w for w in rank.of(Wrapped)}
        for seen in {(e.model, e.optimizer): e for e in rank.of(Replica)}.values():
            if seen.model in wrapped:
                member = Member(rank, seen, wrapped[seen.model])
                members.setdefault((seen.ranks, seen.model), []).append(member)
    for (ranks, model), holders in members.items():
        lacking: dict[int, Ownership] = {}
        names: dict[str, list[Member]] = {}
        for number in ranks:
            event = _latest(run.ranks.get(number), model)
            for name in event.missing if event is not None else ():
                others = [m for m in holders if m.rank.rank != number and _moves(m, name)]
                if event is not None and others:
                    lacking[number] = event
                    names.setdefault(name, []).extend(others)
        if lacking:
            yield _told(run, lacking, names)


def _latest(rank: Rank | None, model: int) -> Ownership | None:
    """What holds at the end."""
    events = [e for e in rank.of(Ownership) if e.model == model] if rank is not None else []
    return events[-1] if events else None


def _moves(member: Member, name: str) -> bool:
    """Whether this rank's optimizer holds a parameter, and it has changed between two looks."""
    names = [p.name for p in member.wrapped.parameters]
    positions = [names[p] for p in unpack(member.seen.parameters)]
    if name not in positions:
        return False
    return _replicas.changes(member, positions.index(name), len(positions))


def _told(
    run: Run, lacking: dict[int, Ownership], names: dict[str, list[Member]]
) -> dict[str, Any]:
    number, event = next(iter(lacking.items()))
    rank = run.ranks[number]
    holders = tuple(sorted({m.rank.rank for every in names.values() for m in every}))
    first = next(iter(names.values()))[0]
    kind, ranks = first.wrapped.kind, tuple(sorted(lacking))
    steps = [e for e in first.rank.of(StepDone) if e.optimizer == first.optimizer]
    spot = first.rank.location(steps[0].site if steps else -1)
    made = rank.location(event.site)
    last = max((e.step for e in steps), default=0)
    verb = "differs" if len(names) == 1 else "differ"
    them = "it" if len(names) == 1 else "them"
    return {
        "severity": Severity.ERROR,
        "ranks": ranks,
        "steps": Steps(0, last, last + 1),
        "subjects": tuple(names),
        "location": spot or made,
        "label": f"changes {them} on {ranks_text(holders)} only",
        "related": (Related(f"leaves {them} out on {ranks_text(ranks)}", made),) if made else (),
        "summary": f"{_causes.some(list(names))} of {kind} {verb} between ranks: the optimizer of "
        f"{ranks_text(holders)} changes {them}, and on {ranks_text(ranks)} nothing does",
        "cause": f"the optimizers hold other parameters on each rank, and what that of "
        f"{ranks_text(holders)} makes of {them} is not sent to {ranks_text(ranks)}: DDP averages "
        "gradients, never parameters",
        "fix": "where the optimizer is sharded on purpose: send every parameter, after the step, "
        "from the rank whose optimizer holds it (`dist.broadcast(p.data, owner)`); where it is "
        "not: give the optimizer the same parameters on every rank",
        "fix_kind": FixKind.CHECK,
        "evidence": {
            "held on": list(holders),
            "unchanged on": list(ranks),
            "parameters": len(names),
            "parameters with gradients": event.trained,
        },
        "at": rank.wall(event.at),
    }
