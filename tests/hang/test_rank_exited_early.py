"""DDP604 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from tapes import START, Tape, run_of

from ddpdoctor.events import ExceptionRaised, RankExiting
from ddpdoctor.findings import Finding
from ddpdoctor.ring import State
from ddpdoctor.run import Run

CLOSED = "[../pair.cc:553] Connection closed by peer [127.0.0.1]:22410"


def found(run: Run) -> list[Finding]:
    return list(RankExitedEarly().examine(run))


def left(
    tmp_path: Path,
    message: str = CLOSED,
    leaver: list[object] | None = None,
    caught: bool = False,
) -> Run:
    made = {rank: Tape(rank, 2) for rank in range(2)}
    loop = ((8, "for batch in loader:"), (7, "for epoch in range(3):"))
    for tape in made.values():
        tape.call(line=9, inside=loop)
    made[0].call(line=9, inside=loop, state=State.FAILED, at=START + 5, lasts=1)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=message, caught=caught)
    waiter: list[object] = [raised]
    if caught:
        waiter.append(RankExiting(at=START + 6.02, how="sys.exit", status=1))
    ending = leaver or [RankExiting(at=START + 5.5, how="return")]
    return run_of(tmp_path, made, more={0: waiter, 1: ending}, ended={0: 1})  # type: ignore[dict-item]


def test_a_shorter_loop(tmp_path: Path) -> None:
    (finding,) = found(left(tmp_path))
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 7


def test_the_victim_caught_its_error_and_left_with_a_status(tmp_path: Path) -> None:
    run = left(tmp_path, caught=True)
    (finding,) = found(run)
    assert finding.ranks == (1,)
    (lost,) = FirstFailure().examine(run)
    assert lost.ranks == (0,)
    assert RankExitedEarly().explains(finding, lost)


def test_it_failed_itself(tmp_path: Path) -> None:
    raised = ExceptionRaised(at=START + 5.4, kind="ValueError", message="boom")
    leaver: list[object] = [raised, RankExiting(at=START + 5.5, how="exception", status=1)]
    assert found(left(tmp_path, leaver=leaver)) == []


def test_all_leave_together(tmp_path: Path) -> None:
    made = {rank: Tape(rank, 2).call(line=9) for rank in range(2)}
    ends = {r: [RankExiting(at=START + 5 + r, how="return")] for r in made}
    assert found(run_of(tmp_path, made, more=ends)) == []
