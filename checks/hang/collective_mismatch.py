"""DDP601."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.divergence import group_cycles
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.explanations import RULES, Explanation, explain
from ddpdoctor.analysis.divergence.loop_exits import SHIFTED_SCHEDULE
from ddpdoctor.analysis.divergence.mismatch_report import (
    STOPPED_RANKS,
    Mismatch,
    began,
    each_once,
    evidence,
    related,
    standstill,
)
from ddpdoctor.analysis.waiting.snapshot import snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import across_groups, cycle
from ddpdoctor.events import CallSite
from ddpdoctor.report.declarations import STOPPED, Condition, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity
from ddpdoctor.run import Run


class CollectiveMismatch(Check):
    """Ranks are in different collectives at the same time

    ## What it finds
    Collectives of a group are matched by their order, not by their line. Found are ranks that call
    different ones at the same number: `barrier` on one while the others call `all_reduce`, a
    collective that only some ranks call (`if rank == 0:` around it, `f() if rank == 0 else 0`), one
    that a rank skipped because of an exception, two collectives in a different order, a round of a
    loop that some ranks skip or a loop that they leave early. Also where shapes are equal and
    nothing hangs: the same calls in a different order in every round, or one line in a loop over
    names (dictionary keys, a set) that come in a different order. Also ranks that wait for each
    other in collectives of different groups.

    ## How it knows
    Every rank records each collective before it calls it, in a file that outlives the process: its
    number in the group, its arguments and the lines that led there; also DDP's own, in the wrap, a
    forward or a backward. These records are compared between ranks, number by number: by the node's
    monitor once a rank has been in a call for a second, and again for the report. The finding is
    proven. Where every rank concerned waits for another one, or for one that is gone, the deadlock
    is proven too, and the run is stopped unless `--on-hang report` is given.

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
    rules: ClassVar[Mapping[str, str]] = {rule.value: text for rule, text in RULES.items()}
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (
        Effect((*STOPPED, "data-stall"), when=(STOPPED_RANKS, When.SINCE)),
        Effect(
            ("gradient-drift", "parameter-drift"),
            when=(
                Condition(
                    "if gradients of DDP were mixed up",
                    lambda mine, _: "DDP backward" in mine.subjects,
                ),
                STOPPED_RANKS,
                When.SINCE,
            ),
        ),
        Effect(("hyperparameter-skew",), when=(SHIFTED_SCHEDULE,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        found = [d for d in divergences(run) if d.key.name != "new_group" and not d.same_call]
        explained = [explain(divergence) for divergence in found]
        by_divergence = {id(one.divergence): one for one in explained}
        for mismatch in each_once(one.divergence for one in explained):
            yield self._report(run, mismatch, by_divergence[id(mismatch.divergence)])
        now = snapshot_of(run)
        ring = [now.by_rank[r] for r in cycle(now)]
        if ring and across_groups(ring):
            yield self.finding(**group_cycles.report(now, ring))

    def _report(self, run: Run, mismatch: Mismatch, why: Explanation) -> Finding:
        divergence, culprits = mismatch.divergence, mismatch.culprits
        still = standstill(run, mismatch)
        left = why.blamed_loop
        skips = left.skips if left else None
        return self.finding(
            rule=why.rule.value,
            deadlocked=still.deadlocked,
            ranks=tuple(sorted({*culprits, *skips.ranks})) if skips else culprits,
            steps=(skips and skips.steps) or divergence.when,
            subjects=tuple(sorted({m.signature.op for m in divergence.calls.values()})),
            location=why.location,
            label=why.label(culprits),
            related=(
                *(skips.tried if skips else ()),
                *((Related("leads around the call", why.swallowed.head),) if why.swallowed else ()),
                *related(divergence, divergence.call, why.location),
            ),
            summary=why.summary + mismatch.elsewhere,
            cause=why.cause(still.deadlocked),
            fix=why.fix,
            fix_kind=FixKind.CHECK,
            evidence={**evidence(run, mismatch), **(left.evidence if left else {})},
            at=began(divergence, run.started),
        )
