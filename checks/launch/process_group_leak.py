"""DDP105."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import GroupReady, RankExiting
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, ranks_text


class ProcessGroupLeak(Check):
    """The process group is never destroyed

    ## What it finds
    Ranks that end well without `destroy_process_group`.

    ## How it knows
    As its interpreter leaves, each rank records its exit status and how many process groups still
    exist. Ranks that leave some behind without a bad status are named, where no rank failed. The
    finding is proven.

    ## Why it hurts
    The group's threads and sockets are torn down in whatever order the interpreter ends: now and
    then a correct run aborts at its very end, or a rank loses its peers while it still needs them.
    NCCL warns that resources leak.

    ## How to fix it
    `torch.distributed.destroy_process_group()` as the last thing that every rank does.

    ## When it stays quiet
    Where any rank failed or was ended: then nobody expects good manners of the others.
    """

    code = "DDP105"
    name = "process-group-leak"
    family = "launch"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(GroupReady) else "no process group was made"

    def examine(self, run: Run) -> Iterable[Finding]:
        states = {r.state for r in run.ranks.values()}
        if run.outcome() == "killed" or not states <= {"finished", "running"}:
            return
        left = {
            r: e
            for r in run.ranks.values()
            if (e := r.latest(RankExiting)) is not None and e.groups_alive and not e.status
        }
        if not left:
            return
        rank, leaving = next(iter(left.items()))
        made = rank.default_group
        yield self.finding(
            ranks=tuple(r.rank for r in left),
            location=rank.location(made.site) if made else None,
            label="made here, never destroyed",
            summary=(f"{ranks_text(r.rank for r in left)} ended without destroy_process_group"),
            cause="the script ends while its process group still exists",
            fix="`torch.distributed.destroy_process_group()` at the end, on every rank",
            fix_kind=FixKind.SAFE,
            evidence={
                "groups alive at the end": {str(r.rank): e.groups_alive for r, e in left.items()}
            },
            at=rank.wall(leaving.at),
        )
