"""DDP601."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.calls.call_logs import BACKWARD
from ddpdoctor.analysis.control_flow.resumed import OTHER_EPOCHS
from ddpdoctor.analysis.divergence import group_cycles
from ddpdoctor.analysis.divergence.explanations import rules
from ddpdoctor.analysis.divergence.faults import STOPPED_RANKS, Fault, faults
from ddpdoctor.analysis.divergence.loop_exits import SHIFTED_SCHEDULE
from ddpdoctor.analysis.divergence.unanswered import ModelOrder
from ddpdoctor.analysis.waiting.snapshot import snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import across_groups, cycle
from ddpdoctor.events import CallSite
from ddpdoctor.events.operations import operation
from ddpdoctor.report.declarations import STOPPED, Condition, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, State


class CollectiveMismatch(Check):
    """Ranks are in different collectives at the same time

    ## What it finds
    Collectives of a group are matched by their order, not by their line. Found are ranks that call
    different ones at the same number: `barrier` on one while the others call `all_reduce`, a
    collective that only some ranks call (`if rank == 0:` around it, `f() if rank == 0 else 0`), one
    that a rank skipped because of an exception, two collectives in a different order, a round of a
    loop that some ranks skip or a loop that they leave early. Also where shapes are equal and
    nothing hangs: the same calls in a different order in every round, or one line in a loop over
    names (dictionary keys, a set, parameters, numbers that a framework reduces) that come in a
    different order, or of which a rank lacks one.
    Also one of several wrapped models that takes no part in a backward on some ranks, or whose turn
    comes in a different order.
    Also ranks that wait for each other in collectives of different groups, and ranks that have been
    in different steps since one in which they ran different numbers of backwards that communicate.

    ## How it knows
    Every rank records each collective before it calls it, in a file that outlives the process: its
    number in the group, its arguments and the lines that led there; also DDP's own, in the wrap, a
    forward or a backward, with the models that take part in it, and whether a forward also
    broadcasts the order of new buckets. These records are compared between
    ranks, number by number: by the node's monitor once a rank has been in a call for a second, and
    again for the report. The finding is proven. Where every rank concerned waits for another one,
    or for one that is gone, the deadlock is proven too, and the run is stopped unless `--on-hang
    report` is given.

    ## Why it hurts
    The run hangs until the backend's timeout (30 minutes, 10 with NCCL), or gloo aborts. Where both
    calls have the same shape there is no error at all: their data gets mixed up, and training
    continues with it.

    ## How to fix it
    Make every rank of the group call the same collectives in the same order: move the collective
    out of the branch, or compute the condition from a value that is equal on all ranks. Do not call
    collectives in `__del__`, which runs at a different time on every rank.

    ## When it stays quiet
    - Point-to-point calls.
    - The branches of `if rank == 0: broadcast(...) else: broadcast(...)`: different lines, but the
      same call, also where the ranks take turns in them.
    - Calls that a rank makes at the end of torch's `Join` while others still have inputs.
    - Ranks outside of the group, and a rank that is only behind.
    """

    code = "DDP601"
    name = "collective-mismatch"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {**rules(name), **group_cycles.RULES}
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (
        Effect((*STOPPED, "data-stall"), when=(STOPPED_RANKS, When.SINCE)),
        Effect(
            ("gradient-drift", "parameter-drift"),
            when=(
                Condition(
                    "if gradients of DDP were mixed up",
                    lambda mine, _: BACKWARD in mine.subjects,
                ),
                STOPPED_RANKS,
                When.SINCE,
            ),
        ),
        Effect(("hyperparameter-skew",), when=(SHIFTED_SCHEDULE,)),
        OTHER_EPOCHS,
        Effect(
            ("loss-scale-mismatch",),
            when=(
                Condition(
                    "if ranks go through their models in another order",
                    lambda mine, _: mine.rule == ModelOrder.rule,
                ),
                When.SINCE,
            ),
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in _of_models_once(faults(run, self.name)):
            still = fault.standstill
            fields = fault.fields(still)
            fields["cause"] = f"{fields['cause']}; {_effect(fault, deadlocked=still.deadlocked)}"
            yield self.finding(**fields, fix_kind=FixKind.CHECK)
        now = snapshot_of(run)
        ring = [now.by_rank[r] for r in cycle(now)]
        if ring and across_groups(ring):
            yield self.finding(**group_cycles.report(now, ring))


def _of_models_once(found: list[Fault]) -> list[Fault]:
    """Without models in another order in the forwards of a group, where they are so in its
    backwards, too: it is the gradients that are mixed."""
    mixed = {
        fault.first.key
        for fault in found
        if fault.why.rule == ModelOrder.rule and BACKWARD in fault.why.subjects
    }
    return [
        fault
        for fault in found
        if fault.why.rule != ModelOrder.rule
        or BACKWARD in fault.why.subjects
        or fault.first.key not in mixed
    ]


def _effect(fault: Fault, *, deadlocked: bool) -> str:
    """What follows from it: where no rank goes on, some of the calls may have returned by then."""
    if not deadlocked:
        later = "" if fault.first.width else ", the run hangs later, or the backend aborts"
        return f"different calls are matched with each other: their data gets mixed up{later}"
    ended = {
        m.signature.op: m.rank.rank
        for m in fault.first.calls.values()
        if m.call is not None and m.call.state is State.DONE
    }
    if not ended:
        return group_cycles.DEADLOCKED
    op, rank = min(ended.items())
    what = "returned with the data of another call"
    if not operation(op).carries:
        what = "was answered by another one"
    return (
        f"different calls were matched with each other ({op} on rank {rank} {what}), and now "
        f"{group_cycles.DEADLOCKED}"
    )
