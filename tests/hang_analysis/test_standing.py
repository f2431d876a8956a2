"""When the monitor calls a run still, asks its ranks, and takes it back; on a clock of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from recordings import PID, ring_of, write_folder
from tapes import CallLog

from ddpdoctor.config import Options
from ddpdoctor.events import (
    Event,
    ProcessEnded,
    RankExiting,
    RankStood,
    StallOver,
    StallSeen,
    encode,
)
from ddpdoctor.monitor import stall_detector, system
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Rank, Recording, Run
from ddpdoctor.storage.call_ring import Phase, State
from ddpdoctor.storage.run_folder import EventWriter, RunFolder


class Clock:
    def __init__(self) -> None:
        self.now = 2000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Proves(Check):
    """A check that always proves a deadlock."""

    code, name, family, severity = "DDP699", "test-deadlock", "hang", Severity.ERROR

    def examine(self, run: Run) -> Iterator[Finding]:
        yield self.finding(summary="stuck", cause="", fix="", deadlocked=True)


class Bench:
    """Two ranks with live rings, and a `StallDetector` that looks at them."""

    def __init__(self, path: Path, *checks: Check, **options: object) -> None:
        tapes = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
        folder = write_folder(path / "run", {r: t.events for r, t in tapes.items()}, ended=None)
        self.folder: RunFolder = folder
        self.rings = [ring_of(rank, path) for rank, path in folder.rank_files()]
        self.written: list[Event] = []
        self.recording = Recording(folder)
        self.standing = stall_detector.StallDetector(
            Options(**options),  # type: ignore[arg-type]
            self.written.append,
            lambda: checks,
        )

    def look(self) -> str | None:
        return self.standing.look(self.recording.refresh(), {PID, PID + 1})

    def kinds(self) -> list[str]:
        return [type(e).__name__ for e in self.written]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stall_detector, "time", made)
    monkeypatch.setattr(system, "catches", lambda pid, number: False)
    return made


def wait(bench: Bench, clock: Clock, seconds: float) -> str | None:
    """Look four times a second; the first reason to stop."""
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        reason = bench.look()
        if reason:
            return reason
    return None


def test_a_proof_stops_the_run_within_two_seconds(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, Proves())
    bench.rings[0].begin(0, 1, 0, 0, -1)
    bench.look()
    began = clock.now
    assert wait(bench, clock, 10) == "stuck"
    assert clock.now - began <= 2.5
    assert bench.kinds() == ["RankStood", "RankStood", "StallSeen"]


@pytest.mark.parametrize(("on_hang", "stops"), [("auto", True), ("stop", True), ("report", False)])
def test_what_on_hang_says_is_done(tmp_path: Path, clock: Clock, on_hang: str, stops: bool) -> None:
    bench = Bench(tmp_path, Proves(), on_hang=on_hang)
    bench.rings[0].begin(0, 1, 0, 0, -1)
    assert (wait(bench, clock, 20) is not None) == stops


def test_a_suspicion_is_reported_once_and_withdrawn(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, hang_after=5.0)
    call = bench.rings[0].begin(0, 1, 0, 0, -1)
    bench.look()
    assert wait(bench, clock, 4) is None
    assert bench.written == []
    assert wait(bench, clock, 10) is None
    assert next(e for e in bench.written if isinstance(e, StallSeen)).proven is False
    assert len([e for e in bench.written if isinstance(e, RankStood)]) == 2
    bench.rings[0].mark(call, State.DONE)
    wait(bench, clock, 2)
    assert isinstance(bench.written[-1], StallOver)
    assert bench.kinds().count("StallSeen") == 1


def test_a_pause_that_came_before_is_expected_from_then_on(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path)
    run = bench.recording.refresh()
    call = bench.rings[0].begin(0, 1, 0, 0, -1)
    bench.look()
    wait(bench, clock, 25)
    bench.rings[0].mark(call, State.DONE)
    wait(bench, clock, 3)
    assert bench.standing.hang_after(run) >= 37


def test_ranks_that_compute_do_not_stand_still(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, hang_after=5.0)
    for _ in range(40):
        for ring in bench.rings:
            ring.phase(1, -1)
        wait(bench, clock, 0.5)
    assert bench.written == []


def test_suspected_is_stopped_where_asked(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, hang_after=5.0, on_hang="stop")
    bench.rings[0].begin(0, 1, 0, 0, -1)
    assert wait(bench, clock, 10) == "no rank makes progress"


CRASHED = """\
Fatal Python error: Aborted

Current thread 0x00007f0a2 (most recent call first):
  File "/home/u/train.py", line 12 in step
"""


@pytest.mark.parametrize(("number", "crashed"), [(6, True), (9, None), (15, False)])
def test_the_stack_of_a_crash_is_kept(tmp_path: Path, number: int, crashed: bool | None) -> None:
    bench = Bench(tmp_path)
    run = bench.recording.refresh()
    rank = run.ranks[1]
    assert rank.path is not None
    rank.path.with_suffix(".stacks.txt").write_text(CRASHED)
    rank.ended = ProcessEnded(at=2000.0, rank=1, pid=PID + 1, wall=0.0, signal=number)
    bench.standing.finish(run, {PID, PID + 1})
    stood = [(e.rank, e.crashed) for e in bench.written if isinstance(e, RankStood)]
    assert stood == ([] if crashed is None else [(1, crashed)])


def test_who_leaves_is_given_the_time_to_end(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections close with its process, and the others fail by themselves."""
    monkeypatch.setattr("ddpdoctor.storage.call_ring.time", clock)
    bench = Bench(tmp_path, RankExitedEarly())
    _, path = bench.folder.rank_files()[1]
    with path.open("ab") as file:
        file.write(encode(RankExiting(at=clock.now, how="sys.exit", status=0)) + b"\n")
    bench.rings[1].phase(Phase.LEAVING, -1)
    bench.rings[0].begin(0, 1, 0, 0, -1)
    bench.look()
    assert wait(bench, clock, 4) is None
    node = EventWriter(bench.folder.node_path(0), shared=True)
    node.write(ProcessEnded(at=clock.now, rank=1, pid=PID + 1, wall=0.0, status=0))
    assert wait(bench, clock, 4) is None
    assert bench.written == []
    reason = wait(bench, clock, 4)
    assert reason is not None
    assert "rank 1" in reason and "rank 0" in reason


def test_only_who_does_not_answer_is_sent_a_signal(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says where it stands when it is asked; rank 1 does not get to that."""
    bench = Bench(tmp_path, Proves())
    asked: list[int] = []
    signalled: list[tuple[int, int]] = []

    def question(rank: Rank) -> None:
        asked.append(rank.rank)
        if rank.rank == 0 and rank.path is not None:
            rank.path.with_suffix(".stacks.txt").write_text(CRASHED)

    monkeypatch.setattr(stall_detector, "ask", question)
    monkeypatch.setattr(system, "catches", lambda pid, number: True)
    monkeypatch.setattr(system, "has_open", lambda pid, path: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    bench.rings[0].begin(0, 1, 0, 0, -1)
    assert wait(bench, clock, 10) == "stuck"
    assert asked == [0, 1]
    assert signalled == [(PID + 1, stall_detector.STACK_SIGNAL)]


class Suspects(Check):
    """A check that always suspects something."""

    code, name, family, severity = "DDP698", "test-suspicion", "hang", Severity.ERROR

    def examine(self, run: Run) -> Iterator[Finding]:
        yield self.finding(summary="rank 1 is late", cause="", fix="")


def test_a_stall_that_goes_on_is_told_every_half_minute(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, Suspects(), hang_after=5.0)
    bench.rings[0].begin(0, 1, 0, 0, -1)
    bench.look()
    wait(bench, clock, 20)
    (notice,) = bench.standing.take_notices()
    assert notice.startswith("no progress for 5 s (suspected)") or "rank 1 is late" in notice
    wait(bench, clock, 60)
    told = bench.standing.take_notices()
    assert len(told) == 2
    assert all("no rank went on meanwhile" in line for line in told)
    assert told[0].startswith("still no progress after 3")
    bench.rings[1].phase(1, -1)
    wait(bench, clock, 30)
    (told_again,) = bench.standing.take_notices()
    assert "rank 1 went on meanwhile" in told_again
