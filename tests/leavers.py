"""Runs in which rank 1 of 2 leaves a loop, or the program, before rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from tapes import START, CallLog, run_of

from ddpdoctor.events import Event, ExceptionRaised, RankExiting, Statement
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

CLOSED = "[../pair.cc:553] Connection closed by peer [127.0.0.1]:22410"

LOOPS = ((8, "for batch in loader:"), (7, "for epoch in range(3):"))


def found(run: Run) -> list[Finding]:
    return list(RankExitedEarly().examine(run))


def left(
    tmp_path: Path,
    message: str = CLOSED,
    leaver: list[object] | None = None,
    caught: bool = False,
    loaders: Mapping[int, list[Event]] | None = None,
    loop: Sequence[tuple[int, str] | Statement] = LOOPS,
    waits_at: int = 9,
) -> Run:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=waits_at, inside=loop, state=State.FAILED, at=START + 5, lasts=1)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=message, caught=caught)
    waiter: list[object] = [raised]
    if caught:
        waiter.append(RankExiting(at=START + 6.02, how="sys.exit", status=1))
    ending = leaver or [RankExiting(at=START + 5.5, how="return")]
    read = loaders or {0: [], 1: []}
    more = {0: [*read[0], *waiter], 1: [*read[1], *ending]}
    return run_of(tmp_path, made, more=more, ended={0: 1})  # type: ignore[arg-type]
