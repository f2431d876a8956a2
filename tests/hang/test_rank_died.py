"""DDP605 over literal events, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.rank_died import RankDied
from tapes import START, WALL, Tape, run_of

from ddpdoctor.events import (
    ExceptionRaised,
    GroupDestroyed,
    MemoryLimit,
    ProcessEnded,
    RankExiting,
    RankSample,
)
from ddpdoctor.findings import Finding
from ddpdoctor.ring import State
from ddpdoctor.run import Run


def found(run: Run) -> list[Finding]:
    return list(RankDied().examine(run))


def tapes() -> dict[int, Tape]:
    made = {rank: Tape(rank, 2).call(line=9) for rank in range(2)}
    made[1].call(line=12, state=State.BEGUN, at=START + 5)
    return made


def end(rank: int, at: float, **fields: object) -> ProcessEnded:
    return ProcessEnded(at=at, rank=rank, pid=5000 + rank, wall=WALL, **fields)  # type: ignore[arg-type]


def test_killed(tmp_path: Path) -> None:
    nodes = {0: [end(1, START + 6, signal=9), end(0, START + 6.2, signal=15, by_launcher=True)]}
    (finding,) = found(run_of(tmp_path, tapes(), nodes=nodes, ended=None))
    assert finding.ranks == (1,)
    assert finding.subjects == ("SIGKILL",)
    assert finding.location is not None
    assert finding.location.line == 12


def test_the_kernels_counter_confirms_it(tmp_path: Path) -> None:
    seen = [
        MemoryLimit(at=START, oom_kills=2),
        RankSample(at=START + 1, rank=1, pid=5001, rss_bytes=1 << 30),
        RankSample(at=START + 5, rank=1, pid=5001, rss_bytes=7 << 30),
        end(1, START + 6, signal=9),
        MemoryLimit(at=START + 6.1, oom_kills=3),
    ]
    (finding,) = found(run_of(tmp_path, tapes(), nodes={0: seen}, ended=None))
    assert "lack of memory" in finding.summary
    assert (finding.evidence["memory_first_gib"], finding.evidence["memory_last_gib"]) == (1.0, 7.0)


def test_the_launcher_cleans_up(tmp_path: Path) -> None:
    nodes = {0: [end(1, START + 6, signal=15, by_launcher=True), end(0, START + 5, status=1)]}
    assert found(run_of(tmp_path, tapes(), nodes=nodes, ended=None)) == []


def test_it_died_of_another_ranks_failure(tmp_path: Path) -> None:
    raised = ExceptionRaised(at=START + 5, kind="ValueError", message="boom")
    nodes = {0: [end(0, START + 5.5, status=1), end(1, START + 6, signal=6)]}
    assert found(run_of(tmp_path, tapes(), more={0: [raised]}, nodes=nodes, ended=None)) == []


@pytest.mark.parametrize("by", ["interrupt", "terminate", "doctor"])
def test_somebody_stopped_the_run(tmp_path: Path, by: str) -> None:
    assert found(run_of(tmp_path, tapes(), ended={0: -15, 1: -15}, stopped=by)) == []


def test_abort_at_teardown(tmp_path: Path) -> None:
    made = {rank: Tape(rank, 2).call(line=9) for rank in range(2)}
    more = {
        r: [GroupDestroyed(at=START + 5), RankExiting(at=START + 6, how="return")] for r in made
    }
    assert found(run_of(tmp_path, made, more=more, ended={1: -6})) == []
