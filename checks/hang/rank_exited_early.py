"""DDP604."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.control_flow.resumed import OTHER_EPOCHS
from ddpdoctor.analysis.divergence.attribution import first
from ddpdoctor.analysis.divergence.departure import departure
from ddpdoctor.analysis.divergence.departures import EXPLANATIONS, RULES, UNEVEN_SINCE
from ddpdoctor.analysis.divergence.faults import NEVER_CREATED
from ddpdoctor.analysis.divergence.loop_exits import SHIFTED_SCHEDULE
from ddpdoctor.events import CallSite
from ddpdoctor.report.declarations import Condition, Effect, seen
from ddpdoctor.report.evidence_names import STEPS_TAKEN
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run

SET_FIRST_ON = "the_same_values_first_on_ranks"
"""Name of the evidence of hyperparameter-skew which ranks set the same values at earlier steps."""


def _left_of(mine: Finding) -> set[int]:
    """The ranks that left: they are not at fault where others entered a branch alone."""
    steps = mine.evidence.get(STEPS_TAKEN)
    if mine.rule != "entered-alone" or not isinstance(steps, dict):
        return {*mine.ranks}
    return {int(rank) for rank in steps} - {*mine.ranks}


def _of_another_round(mine: Finding, other: Finding) -> bool:
    """Whether a schedule is right for the round of each rank."""
    early = other.evidence.get(SET_FIRST_ON)
    if isinstance(early, list) and set(early) == _left_of(mine):
        return True
    since = mine.evidence.get(UNEVEN_SINCE)
    return isinstance(since, int) and other.steps is not None and other.steps.first >= since


_ON_RANKS_THAT_STAYED = Condition(
    "on ranks that had not left", lambda mine, other: not _left_of(mine) & set(other.ranks)
)


class RankExitedEarly(Check):
    """A rank finished and left while others still wait for it

    ## What it finds
    Ranks that left without an error (a shorter loop, `break`, `return`, `sys.exit(0)`) or destroyed
    their process group while others are in a collective that needs them. Where those others entered
    a branch alone (`if rank == 0: evaluate(model)`) and are no more than the ranks that left, they
    are at fault.

    ## How it knows
    Each rank records every call before it makes it, when it destroys its groups, and how it exits.
    At the moment the run stands still, or the first rank fails, the ranks that wait in a call are
    compared with those that left without an error: one that has not begun that call never will. The
    finding is proven.

    ## Why it hurts
    With gloo the remaining ranks get `Connection closed by peer` and torchrun blames them; with
    NCCL they hang until the timeout. The rank at fault exits with status 0.

    ## How to fix it
    Let all ranks leave together: the same number of batches on each (`DistributedSampler`,
    `drop_last=True`), a shared decision to stop (`all_reduce` the flag), or `with Join([model]):`
    for uneven inputs.

    ## When it stays quiet
    - Ranks that leave together.
    - A rank that left because it failed: see `first-failure`.
    """

    code = "DDP604"
    name = "rank-exited-early"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = RULES
    requires = (seen(CallSite, otherwise="no collective was seen"),)
    effects = (
        Effect(("rank-missing", "stall")),
        Effect(("group-creation-mismatch",), rules=(NEVER_CREATED,)),
        OTHER_EPOCHS,
        Effect(("hyperparameter-skew",), when=(SHIFTED_SCHEDULE,)),
        Effect(
            ("hyperparameter-skew",),
            when=(Condition("of ranks in different rounds", _of_another_round),),
        ),
        Effect(("first-failure", "rank-died"), when=(_ON_RANKS_THAT_STAYED,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        if why := departure(run):
            now = why.now
            yield self.finding(
                **first(EXPLANATIONS, why).fields(),
                deadlocked=not now.failed
                and all(s.waits_for_good for s in (*why.left, *why.waiting)),
                fix_kind=FixKind.CHECK,
                at=now.at,
            )
