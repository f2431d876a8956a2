"""DDP105: ranks exit without destroying the process group."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import GroupReady, NotObserved, RankExiting
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, ranks_do


class ProcessGroupLeak(Check):
    """The process group is never destroyed

    ## What it finds
    Ranks that exit successfully without `destroy_process_group`.

    ## How it knows
    At interpreter exit each rank records its exit status and how many process groups still exist.
    If no rank failed, the ranks that still have groups are named. The finding is proven.

    ## Why it hurts
    The group's threads and sockets are torn down in no defined order while the interpreter shuts
    down. Now and then a correct run aborts at its very end, or a rank loses its peers while it
    still needs them. NCCL warns about leaked resources.

    ## How to fix it
    Call `torch.distributed.destroy_process_group()` at the end of the program on every rank.

    ## When it stays quiet
    - runs in which a rank failed or was killed, or that `--max-steps` ended
    - groups that a library has created (Lightning, Transformers), which are its own to destroy
    """

    code = "DDP105"
    name = "process-group-leak"
    family = "launch"
    severity = Severity.NOTE
    requires = (seen(GroupReady, otherwise="no process group was created"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        if any(e.check == self.name for r in run.ranks.values() for e in r.of(NotObserved)):
            return
        states = {r.state for r in run.ranks.values()}
        if run.outcome() == "killed" or not states <= {"finished", "running"}:
            return
        left = {
            r: e
            for r in run.ranks.values()
            if (e := r.latest(RankExiting)) is not None and e.groups_alive and not e.status
            if not ((made := r.default_group) and made.library)
        }
        if not left:
            return
        rank, leaving = next(iter(left.items()))
        made = rank.default_group
        yield self.finding(
            ranks=tuple(r.rank for r in left),
            location=rank.location(made.site) if made else None,
            label="created here, never destroyed",
            summary=f"{ranks_do((r.rank for r in left), 'exit')} without destroy_process_group",
            cause="the script ends while its process group still exists",
            fix="call `torch.distributed.destroy_process_group()` at the end on every rank",
            fix_kind=FixKind.SAFE,
            evidence={
                "groups alive at the end": {str(r.rank): e.groups_alive for r, e in left.items()}
            },
            at=rank.wall(leaving.at),
        )
