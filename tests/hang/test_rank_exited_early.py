"""DDP604 over literal calls, and each of its traps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from tapes import CWD, START, Tape, run_of

from ddpdoctor.events import (
    EpochBegan,
    EpochEnded,
    Event,
    ExceptionRaised,
    LoaderSeen,
    RankExiting,
    Site,
)
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
    loaders: Mapping[int, list[Event]] | None = None,
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
    read = loaders or {0: [], 1: []}
    more = {0: [*read[0], *waiter], 1: [*read[1], *ending]}
    return run_of(tmp_path, made, more=more, ended={0: 1})  # type: ignore[arg-type]


def test_a_shorter_loop(tmp_path: Path) -> None:
    (finding,) = found(left(tmp_path))
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 7


def epochs(*ended: bool | None) -> list[Event]:
    """Iterations of the loader in line 8: over, left early, or not ended."""
    events: list[Event] = [
        Site(at=START, id=50, file=f"{CWD}/train.py", line=8, function="main"),
        LoaderSeen(at=START, loader=0, site=50, loop_site=50, dataset="D", length=8, sampler="S"),
    ]
    for number, exhausted in enumerate(ended):
        events.append(EpochBegan(at=START, loader=0, epoch=number, step=0, site=50, batches=2))
        if exhausted is not None:
            events.append(
                EpochEnded(at=START, loader=0, epoch=number, batches=2 if exhausted else 1,
                           samples=4, backwards=1, exhausted=exhausted)
            )  # fmt: skip
    return events


@pytest.mark.parametrize(
    ("waiter", "leaver", "line"),
    [
        (epochs(True, None), epochs(True), 7),  # it went through the loader, and began no more
        (epochs(True, False), epochs(True), 7),
        (epochs(True, None), epochs(True, False), 8),
        (epochs(None), epochs(False), 8),
    ],
)
def test_the_loop_that_was_left(
    tmp_path: Path, waiter: list[Event], leaver: list[Event], line: int
) -> None:
    (finding,) = found(left(tmp_path, loaders={0: waiter, 1: leaver}))
    assert finding.location is not None
    assert finding.location.line == line
    assert "decision to stop" in finding.fix


def test_a_loop_that_only_the_leaver_was_in(tmp_path: Path) -> None:
    made = {rank: Tape(rank, 2).call(line=9) for rank in range(2)}
    made[1].call(line=20, inside=((19, "for x in validation:"),))
    made[0].call(line=20, inside=((19, "for x in validation:"),))
    made[0].call(line=9, text="again", state=State.FAILED, at=START + 5, lasts=1)
    raised = ExceptionRaised(at=START + 6.01, kind="RuntimeError", message=CLOSED)
    more = {0: [raised], 1: [RankExiting(at=START + 5.5, how="return")]}
    (finding,) = found(run_of(tmp_path, made, more=more, ended={0: 1}))  # type: ignore[arg-type]
    assert finding.location is not None
    assert finding.location.line == 9


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
