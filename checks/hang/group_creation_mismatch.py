"""DDP607."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.calls.call_logs import GroupCalls, call_logs
from ddpdoctor.analysis.control_flow.branches import condition, head_of, leading, parts
from ddpdoctor.analysis.divergence.explanations import (
    NEW_GROUP_OF_MEMBERS,
    NEW_GROUP_ON_ALL,
    members,
    rules,
)
from ddpdoctor.analysis.divergence.faults import NEVER_CREATED, faults
from ddpdoctor.analysis.waiting.snapshot import snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import awaited
from ddpdoctor.events import CallSite
from ddpdoctor.report.declarations import STOPPED, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, ranks_text

WITHIN = (
    "run this line on every rank, or on none: it calls new_group itself, as a loader over an "
    "`IterDataPipe` does when it is iterated"
)


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
        **rules(name),
        NEVER_CREATED: "some ranks never create a group that others create",
    }
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (Effect((*STOPPED, "collective-mismatch"), when=(When.SINCE,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        if fault := next(iter(faults(run, self.name)), None):
            yield self.finding(**fault.fields(fault.standstill), fix_kind=FixKind.TEMPLATE)
        else:
            yield from self._absent(run)

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
        group = f"new_group({members(place.signature.ranks)})"
        most_ranks = [r for r, n in made.items() if n == most]
        within = place.location is not None and "new_group" not in place.location.source
        place_of, head = condition(place) or (None, None)
        spot = place.rank.location(place_of.site) if place_of is not None else None
        yield self.finding(
            rule=NEVER_CREATED,
            deadlocked=stuck,
            ranks=tuple(without if len(without) <= len(most_ranks) else most_ranks),
            steps=Steps.of([place.step]) if place.step > 0 else None,
            subjects=(members(place.signature.ranks),),
            location=place.location,
            label=f"never {'run' if within else 'called'} by {ranks_text(without)}",
            related=(Related(leading(head), head_of(spot, head)),) if spot and head else (),
            summary=f"{ranks_text(most_ranks)} called {group}, but {ranks_text(without)} did not"
            + _meanwhile([s.doing for s in elsewhere if not s.gone]),
            cause="every rank of the world must call new_group, members or not"
            + (f"; {parts(head)}" if head else "")
            + (", and what this line calls makes a group" if within else ""),
            fix=WITHIN
            if within
            else NEW_GROUP_ON_ALL
            if set(without) & set(place.signature.ranks)
            else NEW_GROUP_OF_MEMBERS,
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "groups_made": {str(r): n for r, n in made.items()},
                "waiting": ranks_text(s.rank.rank for s in waits) if waits else "no rank",
            },
            at=place.rank.wall(place.call.began) if place.call else run.started,
        )


def _meanwhile(doing: list[str]) -> str:
    return f" (meanwhile {doing[0]})" if doing else ""
