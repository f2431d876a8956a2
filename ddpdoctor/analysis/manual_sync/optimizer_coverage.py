"""Parameters that only the optimizers of some ranks hold, and whose updates are not sent to the
others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...events import Ownership, Replica, StepDone, Wrapped
from ...events.pack import unpack
from ...report.findings import Related, Severity, Steps
from ...run import Rank, Run, plural, ranks_text, some
from ..replicas import moving
from ..replicas.replica import Member

HELD_ON_SOME = "held-on-some-ranks"

RULES = {HELD_ON_SOME: "only the optimizers of some ranks hold and change the parameters"}

Key = tuple[tuple[int, ...], int]
"""Ranks of the group, and the model's number."""


def compared(run: Run) -> bool:
    """Whether there is something to report."""
    return any(reported(run))


def reported(run: Run) -> Iterator[dict[str, Any]]:
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
            if event is None:
                continue
            still = [m for m in holders if m.rank.rank != number and _steps_on(m, event.step)]
            for name in event.missing:
                others = [m for m in still if _moves(m, name)]
                if others:
                    lacking[number] = event
                    names.setdefault(name, []).extend(others)
        if lacking:
            yield _fields(run, lacking, names)


def _latest(rank: Rank | None, model: int) -> Ownership | None:
    """The last record of a model: what the optimizers hold at the end."""
    events = [e for e in rank.of(Ownership) if e.model == model] if rank is not None else []
    return events[-1] if events else None


def _steps_on(member: Member, step: int) -> bool:
    """Whether an optimizer still steps after `step` steps of all optimizers of its process."""
    reported = list(member.rank.of(StepDone))
    mine = [k for k, e in enumerate(reported) if e.optimizer == member.optimizer]
    return bool(mine) and sum(e.count for e in reported[: mine[-1] + 1]) >= step


def _moves(member: Member, name: str) -> bool:
    """Whether this rank's optimizer holds a parameter until the end, and it changes between two
    looks."""
    own = _latest(member.rank, member.model)
    if own is not None and name in own.missing:
        return False
    names = [p.name for p in member.wrapped.parameters]
    positions = [names[p] for p in unpack(member.seen.parameters)]
    if name not in positions:
        return False
    return moving.changes(member, positions.index(name), len(positions))


def _fields(
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
    verb = plural(len(names), "differs", "differ")
    them = plural(len(names), "it", "them")
    shared = holders == ranks  # each rank lacks what another holds
    here, there = ranks_text(holders), ranks_text(ranks)
    if shared:
        label, without = "updates a part of them on each rank", "holds a part of them only"
        who = f"each of {there} updates only a part of them"
        sent = "no rank sends its updates to the others"
    else:
        label, without = f"updates {them} on {here} only", f"does not hold {them} on {there}"
        who = f"only the optimizer of {here} updates {them}, not that of {there}"
        sent = f"the updates of {here} are not sent to {there}"
    return {
        "rule": HELD_ON_SOME,
        "severity": Severity.ERROR,
        "ranks": ranks,
        "steps": Steps(0, last, last + 1),
        "subjects": tuple(names),
        "location": spot or made,
        "label": label,
        "related": (Related(without, made),) if made else (),
        "summary": f"{some(names)} of {kind} {verb} between ranks: {who}",
        "cause": f"the optimizers hold different parameters on each rank, and {sent}: DDP averages "
        "gradients, never parameters",
        "fix": "give the optimizer the same parameters on every rank; or if it is sharded on "
        "purpose, broadcast every parameter after the step from the rank whose optimizer holds it "
        "(`dist.broadcast(p.data, owner)`)",
        "evidence": {
            "held_on": list(holders),
            "unchanged_on": list(ranks),
            "parameters": len(names),
            "parameters_with_gradients": event.trained,
        },
        "at": rank.wall(event.at),
    }
