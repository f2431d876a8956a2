"""Where ranks stood that somebody ended before the stall time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ddpdoctor.checks.hang.rank_missing import RankMissing
from recordings import PID, START, WALL, make_run
from tapes import CallLog, run_of, stood

from ddpdoctor import render
from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    Frame,
    ProcessEnded,
    RankSample,
    Stopped,
    TorchLoaded,
)
from ddpdoctor.render.live import snapshot
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Report, Severity
from ddpdoctor.storage.call_ring import Phase, State


@pytest.mark.parametrize(("seconds", "told"), [(28, True), (0.4, False)])
def test_where_they_stood_is_told(tmp_path: Path, seconds: float, told: bool) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call("barrier", 31, state=State.WAITING, at=START + 5)
    made[1].progress_at = START + 5
    at = START + 5 + seconds
    seen: list[Event] = [
        Stopped(at=at, by="terminate", reason="SIGTERM"),
        *(ProcessEnded(at=at + 0.1, rank=r, pid=PID + r, wall=WALL, signal=15, by_launcher=True)
          for r in made),
        stood(1, 14, "fcntl.flock(f, fcntl.LOCK_EX)", at=at + 0.1),
    ]  # fmt: skip
    run = run_of(tmp_path, made, nodes={0: seen}, outcome="killed")
    report = diagnose(run, [RankMissing()])
    places = [r.stood for r in report.ranks]
    assert places == (["in barrier at train.py:31 for 28 s", "at train.py:14 in main"] * told
                      or ["", ""])  # fmt: skip
    text = " ".join(render.text(report).split())
    assert ("rank 0 was in barrier at train.py:31 for 28 s, rank 1 was at" in text) is told
    assert all(r.last == r.stood for r in report.ranks) is told


def lost(tmp_path: Path, tape: CallLog, *events: Event, seen_at: float = START + 12) -> str:
    """Where rank 1 was, of which a last sample is on record, and no end."""
    sample = RankSample(at=seen_at, rank=1, pid=PID + 1, rss_bytes=1)
    made = {0: CallLog(0, 2).call(line=9), 1: tape}
    run = run_of(tmp_path, made, nodes={0: [sample]}, more={1: events}, outcome=None)
    return diagnose(run, [RankMissing()]).ranks[1].stood


def test_where_a_rank_was_when_everything_was_killed(tmp_path: Path) -> None:
    waiting = CallLog(1, 2).call("barrier", 31, state=State.BEGUN, at=START + 5)
    assert lost(tmp_path / "a", waiting) == "in barrier at train.py:31 for 7 s"
    computing = CallLog(1, 2).call(line=9).now(Phase.USER, 12)
    computing.progress_at = START + 5
    assert lost(tmp_path / "b", computing) == "in its own code since train.py:12 for 7 s"
    loading = CallLog(1, 2).call(line=9).now(Phase.DATA, 7)
    loading.progress_at = START + 5
    assert lost(tmp_path / "c", loading) == "waiting for a batch at train.py:7 for 7 s"


def test_where_it_was_in_the_middle_of_a_step(tmp_path: Path) -> None:
    for number, (phase, told) in enumerate(
        [(Phase.BACKWARD, "in a backward at train.py:12"), (Phase.USER, "")]
    ):
        tape = CallLog(1, 2).call(line=9).now(phase, 12)
        tape.progress_at = START + 5
        assert lost(tmp_path / str(number), tape, seen_at=START + 4.8) == told


def test_a_rank_that_raised_is_not_in_that_backward_any_more(tmp_path: Path) -> None:
    tape = CallLog(1, 2).call(line=9).now(Phase.BACKWARD, 12)
    tape.progress_at = START + 5
    raised = ExceptionRaised(at=START + 6, kind="ValueError", message="bad", caught=True)
    assert lost(tmp_path, tape, raised) == "in a backward at train.py:12 for 7 s"
    assert not lost(tmp_path / "x", tape, msgspec.structs.replace(raised, caught=False))


@pytest.mark.parametrize(("seconds", "told"), [(7, True), (0.4, False)])
def test_the_live_table_says_where_ranks_stand(tmp_path: Path, seconds: float, told: bool) -> None:
    waiting = CallLog(1, 2).call("barrier", 31, state=State.BEGUN, at=START + 5)
    sample = RankSample(at=START + 5 + seconds, rank=1, pid=PID + 1, rss_bytes=1)
    made = {0: CallLog(0, 2).call(line=9), 1: waiting}
    run = run_of(tmp_path, made, nodes={0: [sample]}, ended=None, outcome=None)
    run.ranks[1].alive = True
    table = snapshot(run, "runs/a", 100, 20, styled=False)
    assert ("in barrier at train.py:31 for 7 s" in table) is told
    assert "running" in table


def stopped_by_hand(tmp_path: Path, tape: CallLog, still_s: float) -> Report:
    """Ctrl-C came 12 s after the start; rank 1 died of it with a traceback."""
    at = START + 12
    frames = (Frame("/home/user/project/train.py", 14, "wait_for_license", user=True),)
    raised = ExceptionRaised(
        at=at + 0.01, kind="KeyboardInterrupt", message="", frames=frames, still_s=still_s
    )
    seen: list[Event] = [
        Stopped(at=at, by="interrupt", reason="SIGINT"),
        *(ProcessEnded(at=at + 2, rank=r, pid=PID + r, wall=WALL, signal=2) for r in range(2)),
    ]
    made = {0: CallLog(0, 2).call(line=9), 1: tape}
    for ending in made.values():
        ending.now(Phase.LEAVING, -1)
        ending.progress_at = at + 0.5
    run = run_of(tmp_path, made, nodes={0: seen}, more={1: [raised]}, outcome="killed")
    return diagnose(run, [RankMissing()])


def row(report: Report) -> tuple[str, str]:
    return report.ranks[1].stood, report.ranks[1].last


def test_where_they_stood_at_ctrl_c(tmp_path: Path) -> None:
    place = "at train.py:14 in wait_for_license"
    slept = stopped_by_hand(tmp_path / "a", CallLog(1, 2).call(line=9), 4.2)
    assert row(slept) == (f"{place} for 4 s",) * 2
    training = stopped_by_hand(tmp_path / "b", CallLog(1, 2).call(line=9), 0.02)
    assert row(training) == ("", f"interrupted {place}")
    for report, severity, told in (
        (slept, Severity.NOTE, True),
        (slept, Severity.ERROR, False),
        (training, Severity.NOTE, False),
    ):
        other = RankMissing().finding(severity=severity, summary="other", cause="c", fix="f")
        text = " ".join(render.text(msgspec.structs.replace(report, findings=(other,))).split())
        assert (f"at the end rank 1 was {place} for 4 s" in text) is told
    for lasted, told in (4.0, "in all_reduce at train.py:10 for 4 s"), (0.3, ""):
        waiting = CallLog(1, 2).call(at=START + 12 - lasted, lasts=lasted + 0.2, state=State.FAILED)
        report = stopped_by_hand(tmp_path / f"c{lasted}", waiting, 0.0)
        assert row(report) == (told, told or f"interrupted {place}")


def test_a_rank_that_was_killed_while_nobody_stopped_the_run(tmp_path: Path) -> None:
    tape = CallLog(1, 2).call(line=9).now(Phase.DATA, 7)
    tape.progress_at = START + 5
    killed = ProcessEnded(at=START + 12, rank=1, pid=PID + 1, wall=WALL, signal=9)
    made = {0: CallLog(0, 2).call(line=9), 1: tape}
    run = run_of(tmp_path, made, nodes={0: [killed]}, outcome="killed")
    assert row(diagnose(run, []))[0] == "waiting for a batch at train.py:7 for 7 s"


@pytest.mark.parametrize(("at", "place"), [(40, "at train.py:6 in main"), (0.5, "")])
def test_where_a_rank_stood_that_never_came_to_a_group(at: float, place: str) -> None:
    seen = stood(1, 6, "time.sleep(.5)", at=START + at)
    came = TorchLoaded(at=START + 1, torch="2.13.0")
    run = make_run({0: [], 1: [came]}, ended={0: 1, 1: -15}, nodes={0: [seen]})
    assert diagnose(run, []).ranks[1].stood == place


@pytest.mark.parametrize(("by", "state"), [("doctor", "hung"), ("interrupt", "lost")])
def test_a_rank_that_the_doctor_stopped_and_whose_end_nobody_saw(by: str, state: str) -> None:
    run = make_run({0: [], 1: []}, ended=None, nodes={0: [Stopped(at=START + 9, by=by)]})
    assert [rank.state for rank in run.ranks.values()] == [state, state]
