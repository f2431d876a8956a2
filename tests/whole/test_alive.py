"""Whether a run without an end on record still goes on, and which of its processes a rank was."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from recordings import PID, START, WALL, started, steps, torch_loaded, write_folder

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    GroupReady,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    Stopped,
)
from ddpdoctor.report.findings import Severity
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.report.registry import all_checks
from ddpdoctor.run import Recording
from ddpdoctor.storage.run_folder import RunFolder


def here(rank: int, pid: int) -> Event:
    return started(rank, 2, pid=pid, node=platform.node(), wall=time.time(), at=0.0)


def test_a_rank_whose_process_is_there_runs(tmp_path: Path) -> None:
    gone = 2**22 + 1  # above the kernel's largest pid
    ranks = {0: [here(0, os.getpid()), *steps(3)], 1: [here(1, gone), *steps(3)]}
    write_folder(tmp_path / "run", ranks, ended=None)
    run = open_run([tmp_path / "run"])
    assert [r.state for r in run.last.ranks.values()] == ["running", "lost"]
    assert run.report(all_checks()).run.outcome == "incomplete"


def test_an_old_record_is_not_taken_for_a_process_with_the_same_pid(tmp_path: Path) -> None:
    ranks = {0: [started(0, 1, pid=os.getpid(), node=platform.node(), wall=1e9, at=0.0)]}
    write_folder(tmp_path / "run", ranks, ended=None)
    assert [r.state for r in open_run([tmp_path / "run"]).last.ranks.values()] == ["lost"]


def test_of_processes_in_turn_the_rank_is_the_one_that_trained(tmp_path: Path) -> None:
    wrapper = [started(0, 1, at=0.0, wall=100.0), RankExiting(at=1.0, how="return", status=0)]
    training = [started(0, 1, at=2.0, wall=102.0, pid=77), torch_loaded(), *steps(5)]
    folder = write_folder(tmp_path / "run", {0: wrapper}, twins={0: [training]}, ended=None)
    rank = Recording(folder).refresh().ranks[0]
    assert rank.steps == 5
    assert [t.steps for t in rank.twins] == [0]


def test_of_processes_at_once_the_first_stays_the_rank(tmp_path: Path) -> None:
    first = [started(0, 1, at=0.0, wall=100.0), torch_loaded()]
    second = [started(0, 1, at=2.0, wall=102.0, pid=77), torch_loaded(), *steps(5)]
    recording = Recording(write_folder(tmp_path / "run", {0: first}, twins={0: [second]}))
    for _ in range(3):  # a live run is read again and again
        rank = recording.refresh().ranks[0]
    assert rank.steps == 0
    assert [t.steps for t in rank.twins] == [5]


def test_what_is_no_file_of_ours_is_no_rank(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(2), 1: steps(2)})
    (folder.path / "rank-3.jsonl").mkdir()
    (folder.path / "rank-4.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder.path / "rank-5.jsonl")
    assert sorted(Recording(folder).refresh().ranks) == [0, 1]


def test_nodes_that_all_think_they_are_the_first(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {0: steps(2)}, world_size=2, nodes={0: []}, outcome="completed")
    write_folder(
        tmp_path / "b", {1: steps(2)}, world_size=2, ended={1: 1}, outcome="failed", exit_code=1
    )
    run = open_run([tmp_path / "a", tmp_path / "b"]).last
    assert sorted(run.nodes) == [0, 1]
    assert run.outcome() == "failed"


def test_a_folder_given_twice_is_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", {0: steps(2)})
    assert len(open_run([tmp_path / "run", tmp_path / "run" / "."]).folders) == 1


def test_earlier_attempts_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", {0: steps(2), 1: steps(2)}, ended={0: None, 1: 3})
    write_folder(tmp_path / "run", {0: steps(2), 1: steps(2)}, attempt=1)
    report = open_run([tmp_path / "run"]).report(all_checks())
    (told,) = report.run.earlier
    assert told.startswith("attempt 0 failed:") and "status 3" in told
    assert RunFolder(tmp_path / "run").attempts() == [0, 1]
    (died,) = (f for f in report.findings if f.check == "first-failure")
    assert (died.severity, died.attempt) == (Severity.NOTE, 0)  # the restart recovered it
    assert died.summary.startswith("in attempt 0: ")
    assert report.worst() is Severity.NOTE


def test_of_an_earlier_attempt_the_rank_that_died_is_named(tmp_path: Path) -> None:
    """Its end is seen later than what the other one raises because of it."""
    peer = ExceptionRaised(at=START + 1, kind="RuntimeError", message="Connection reset by peer")
    end = ProcessEnded(at=START + 1.5, rank=1, pid=PID + 1, wall=WALL + 1.5, signal=9)
    write_folder(tmp_path / "run", {0: [*steps(2), peer], 1: steps(2)}, ended={0: 1, 1: None},
                 nodes={0: [end]})  # fmt: skip
    write_folder(tmp_path / "run", {0: steps(2), 1: steps(2)}, attempt=1)
    (told,) = open_run([tmp_path / "run"]).report(all_checks()).run.earlier
    assert told.startswith("attempt 0 failed: rank 1 died of SIGKILL")


def test_an_earlier_attempt_is_not_stopped_by_who_stops_the_last(tmp_path: Path) -> None:
    """The other one raises before the process of the rank that left is gone."""
    peer = ExceptionRaised(at=START + 2, kind="RuntimeError", message="Connection closed by peer")
    left = RankExiting(at=START + 1, how="sys.exit", status=17)
    write_folder(tmp_path / "run", {0: [*steps(2), peer], 1: [*steps(2), left]},
                 ended={0: -15, 1: 17})  # fmt: skip
    again = ProcessStarted(
        at=START + 61, rank=0, local_rank=0, pid=PID + 9, wall=WALL + 61, attempt=1
    )
    stop = Stopped(at=START + 62, by="terminate", reason="SIGTERM")
    write_folder(tmp_path / "run", {0: steps(2), 1: steps(2)}, attempt=1,
                 ended={0: -15, 1: -15}, nodes={0: [again, stop]})  # fmt: skip
    report = open_run([tmp_path / "run"]).report(all_checks())
    (told,) = report.run.earlier
    assert told.startswith("attempt 0 failed:") and "status 17" in told
    (failed,) = (f for f in report.findings if f.check == "first-failure")
    assert (failed.attempt, failed.ranks) == (0, (1,))


def test_a_fault_that_the_last_attempt_could_not_show_is_not_recovered(tmp_path: Path) -> None:
    ready = GroupReady(at=0, group=0, name="0", backend="gloo", ranks=(0,), member=True, site=-1)
    write_folder(
        tmp_path / "run", {0: [ready, RankExiting(at=0, how="return", status=0, groups_alive=1)]}
    )
    write_folder(tmp_path / "run", {0: []}, attempt=1)
    report = open_run([tmp_path / "run"]).report(all_checks())
    assert [(f.check, f.attempt) for f in report.findings] == [("process-group-leak", 0)]
    assert report.worst() is Severity.NOTE
