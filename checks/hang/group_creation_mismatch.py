"""DDP607."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.calls.call_logs import CallRecord, GroupCalls, call_logs
from ddpdoctor.analysis.control_flow.branches import condition, head_of
from ddpdoctor.analysis.divergence.divergence import CallDivergence
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.mismatch_report import (
    NEVER_CREATED,
    Mismatch,
    began,
    evidence,
    related,
    standstill,
)
from ddpdoctor.analysis.waiting.snapshot import snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import awaited
from ddpdoctor.events import CallSite
from ddpdoctor.report.declarations import STOPPED, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, ranks_do, ranks_text


class GroupCreationMismatch(Check):
    """Ranks do not create the same process groups in the same order

    ## What it finds
    `new_group` must be called by *every* rank of the world, members or not, with the same ranks and
    in the same order. Found are groups that only their members create, and groups that are created
    in a different order.

    ## How it knows
    Every rank records each `new_group` and its members before it calls it. These records are
    compared between ranks, number by number. A group that only some ranks create is reported once
    they wait in `new_group` and the others wait elsewhere or are gone, or when the run is over or
    fails: until then the others may only be late. The finding is proven.

    ## Why it hurts
    Groups are matched by the order of their creation. A rank that skips one shifts all that follow:
    the others wait for it until the timeout, or ranks of two different groups are matched and
    reduce each other's data.

    ## How to fix it
    Loop over all groups on every rank and keep the one that contains this rank, or create them with
    `use_local_synchronization=True`.

    ## When it stays quiet
    - Groups created with `use_local_synchronization=True`.
    - A rank that is only behind.
    """

    code = "DDP607"
    name = "group-creation-mismatch"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "different-order": "ranks create different groups at the same number",
        "members-only": "every rank creates only the groups that it is a member of",
        NEVER_CREATED: "some ranks never create a group that others create",
    }
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (Effect((*STOPPED, "collective-mismatch"), when=(When.SINCE,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        found = next((p for p in divergences(run) if p.key.name == "new_group"), None)
        if found is not None:
            yield self._order(run, found)
        else:
            yield from self._absent(run)

    def _order(self, run: Run, divergence: CallDivergence) -> Finding:
        sides: dict[tuple[int, ...], list[int]] = {}
        for rank, made in divergence.calls.items():
            sides.setdefault(made.signature.ranks, []).append(rank)
        created = ", ".join(
            f"{ranks_do(r, 'create')} {_members(members)}" for members, r in sides.items()
        )
        branched = _of_members(divergence)
        mismatch = Mismatch(divergence)
        cause = (
            "every rank of the world must call new_group, members or not, and the calls are "
            "matched by their order"
        )
        return self.finding(
            rule="members-only" if branched else "different-order",
            deadlocked=standstill(run, mismatch).deadlocked,
            ranks=tuple(sorted(divergence.calls)) if branched else divergence.culprits,
            steps=_late(divergence.call),
            subjects=tuple(_members(members) for members in sides),
            location=divergence.location,
            label="other ranks create a different group",
            related=branched or related(divergence, divergence.call, divergence.location),
            summary=f"ranks create different process groups at call {divergence.index} of "
            f"new_group: {created}",
            cause=f"{cause}; here only its members create each group" if branched else cause,
            fix=_FIX,
            fix_kind=FixKind.TEMPLATE,
            evidence=evidence(run, mismatch),
            at=began(divergence, run.started),
        )

    def _absent(self, run: Run) -> Iterator[Finding]:
        """Some ranks created more groups than others, which are elsewhere or gone."""
        known = call_logs(run)
        logs = next((v for k, v in known.logs.items() if k.name == "new_group"), {})
        made = {r: logs[r].issued if r in logs else 0 for r in run.ranks}
        most, least = max(made.values(), default=0), min(made.values(), default=0)
        if most == least or not logs:
            return
        now = snapshot_of(run)
        without = [r for r, n in made.items() if n < most]
        waiting = [s for r, s in now.by_rank.items() if r not in without and s.blocked]
        waits = [s for s in waiting if s.made is not None and s.made.signature.op == "new_group"]
        makers = {id(s) for s in waits}
        elsewhere = [
            s
            for s in (now.by_rank[r] for r in without)
            if s.gone or any(id(o) in makers for o in awaited(now, s))
        ]
        over = not waits and all(s.gone for s in now.by_rank.values())
        if not (waits and len(elsewhere) == len(without)) and not over and not now.failed:
            return  # they may only be late
        log: GroupCalls = max(logs.values(), key=lambda one: one.issued)
        place = known.at(log, least)
        if place is None:
            return
        stuck = bool(waits) and all(s.waits_for_good for s in (*waits, *elsewhere))
        group = f"new_group({_members(place.signature.ranks)})"
        most_ranks = [r for r, n in made.items() if n == most]
        yield self.finding(
            rule=NEVER_CREATED,
            deadlocked=stuck,
            ranks=tuple(without if len(without) <= len(most_ranks) else most_ranks),
            steps=_late(place),
            subjects=(_members(place.signature.ranks),),
            location=place.location,
            label=f"never called by {ranks_text(without)}",
            summary=f"{ranks_text(most_ranks)} called {group}, but {ranks_text(without)} did not"
            + _meanwhile([s.doing for s in elsewhere if not s.gone]),
            cause="every rank of the world must call new_group, members or not",
            fix=_FIX,
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "groups_made": {str(r): n for r, n in made.items()},
                "waiting": ranks_text(s.rank.rank for s in waits) if waits else "no rank",
            },
            at=place.rank.wall(place.call.began) if place.call else run.started,
        )


_FIX = (
    "call new_group on every rank, in the same order, and keep the group with this rank: "
    "`for ranks in all_groups: group = dist.new_group(ranks); mine = group if rank in ranks "
    "else mine`; or pass `use_local_synchronization=True`"
)


def _of_members(divergence: CallDivergence) -> tuple[Related, ...]:
    """The branch by which every rank creates only groups that it is a member of, or empty."""
    found = [(made, condition(made)) for made in divergence.calls.values()]
    heads = {around[1].line for _, around in found if around is not None}
    if len(heads) != 1 or any(around is None for _, around in found):
        return ()
    if any(rank not in made.signature.ranks for rank, made in divergence.calls.items()):
        return ()
    place, head = found[0][1] or (None, None)
    spot = divergence.call.rank.location(place.site) if place else None
    if spot is None or head is None:
        return ()
    return (Related("only members enter this branch", head_of(spot, head)),)


def _late(place: CallRecord) -> Steps | None:
    """The step in which a group is created, where training had begun by then."""
    return Steps.of([place.step]) if place.step > 0 else None


def _meanwhile(doing: list[str]) -> str:
    return f" (meanwhile {doing[0]})" if doing else ""


def _members(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if ranks else "all ranks"
