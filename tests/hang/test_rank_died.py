"""DDP605 over literal events, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.hang.rank_died import RankDied
from recordings import CWD, started, steps
from tapes import START, WALL, CallLog, run_of, stood

from ddpdoctor.events import (
    ExceptionRaised,
    GroupDestroyed,
    GroupReady,
    MemoryLimit,
    ProcessEnded,
    RankExiting,
    RankSample,
    SignalSent,
    Site,
    SpawnEnded,
    StallSeen,
)
from ddpdoctor.launch.outcome import outcome
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Confidence, Finding, Severity
from ddpdoctor.run import Rank, Run, load
from ddpdoctor.storage.call_ring import State
from ddpdoctor.storage.run_folder import RunFolder


def found(run: Run) -> list[Finding]:
    return list(RankDied().examine(run))


def tapes() -> dict[int, CallLog]:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[1].call(line=12, state=State.BEGUN, at=START + 5)
    return made


def end(rank: int, at: float, **fields: object) -> ProcessEnded:
    return ProcessEnded(at=at, rank=rank, pid=5000 + rank, wall=WALL, **fields)  # type: ignore[arg-type]


def test_killed(tmp_path: Path) -> None:
    nodes = {0: [end(1, START + 6, signal=9), end(0, START + 6.2, signal=15, by_launcher=True)]}
    (finding,) = found(run_of(tmp_path, tapes(), nodes=nodes, ended=None))
    assert finding.rule == "killed-outside"
    assert finding.ranks == (1,)
    assert finding.subjects == ("SIGKILL",)
    assert finding.location is not None
    assert finding.location.line == 12


def test_where_it_was_is_told_only_where_that_is_known(tmp_path: Path) -> None:
    ends = {0: [end(1, START + 6, signal=9)]}
    (inside,) = found(run_of(tmp_path, tapes(), nodes=ends, ended=None))
    assert inside.rule == "killed-outside"
    made = tapes()
    made[1].calls.pop()
    (after,) = found(run_of(tmp_path / "b", made, nodes=ends, ended=None))
    assert after.rule == "killed-outside"


@pytest.mark.parametrize(
    ("spawned", "signal", "doubt"), [(3, 15, True), (2, 15, False), (0, 15, False), (3, 9, False)]
)
def test_told_to_end_beside_spawned_processes_that_are_no_ranks(
    tmp_path: Path, spawned: int, signal: int, doubt: bool
) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.events.insert(0, started(rank, 2, spawned=spawned))
    ends = {0: [end(r, START + 6, signal=signal) for r in made]}
    (finding,) = found(run_of(tmp_path, made, nodes=ends, ended=None))
    assert finding.rule == ("maybe-spawn" if doubt else "killed-outside")
    assert (finding.confidence is Confidence.SUSPECTED) is doubt


@pytest.mark.parametrize("inside", [True, False])
def test_a_crash_is_where_its_stack_says(tmp_path: Path, inside: bool) -> None:
    made = tapes()
    if not inside:
        made[1].calls.pop()
    seen = [stood(1, 20, "crash()", crashed=True), end(1, START + 6, signal=6)]
    run = run_of(tmp_path, made, nodes={0: seen}, ended=None)
    (finding,) = found(run)
    assert finding.rule == "native-crash"
    assert diagnose(run, []).ranks[1].stood == "at train.py:20 in main"
    assert str(finding.location) == "train.py:20"
    assert finding.location is not None
    assert finding.location.source == "crash()"


def aborted(
    tmp_path: Path, backend: str, *, native: bool = True, after: float = 6
) -> list[Finding]:
    """A thread of native code aborts rank 1 in line 20, while rank 0 is in another call."""
    made = tapes()
    made[0].call("broadcast", 30, state=State.BEGUN, at=START + 5)
    for tape in made.values():
        assert isinstance(tape.events[0], GroupReady)
        tape.events[0] = msgspec.structs.replace(tape.events[0], backend=backend)
    there = stood(1, 20, "value.item()", crashed=True, native=native)
    seen = [there, end(1, START + after, signal=6)]
    return found(run_of(tmp_path, made, nodes={0: seen}, ended=None))


def test_a_backend_aborts_the_rank_that_notices(tmp_path: Path) -> None:
    (finding,) = aborted(tmp_path, "gloo")
    assert finding.rule == "backend-abort"
    assert [r.location.line for r in finding.related] == [30]
    assert "rank 0 was in broadcast" in finding.cause
    (own,) = aborted(tmp_path / "own", "gloo", native=False)
    assert own.rule == "native-crash"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_watchdog_of_nccl_ends_a_rank_that_waits(tmp_path: Path, backend: str) -> None:
    """After its timeout the rank is the victim; before, something failed on its device."""
    assert aborted(tmp_path, backend, after=605) == []
    (failed,) = aborted(tmp_path / "early", backend)
    assert failed.rule == "backend-abort"
    assert "NCCL" in failed.cause


@pytest.mark.parametrize(
    ("sender", "to", "number", "named"),
    [(1, 1, 9, True), (0, 1, 9, True), (1, 1, 10, False), (1, 0, 9, False)],
)
def test_a_signal_that_a_rank_sends_is_where_it_was_sent(
    tmp_path: Path, sender: int, to: int, number: int, named: bool
) -> None:
    made = tapes()
    for rank, tape in made.items():
        tape.events.insert(0, started(rank, 2, pid=5000 + rank))
    made[sender].events += [
        Site(at=START + 5, id=77, file=f"{CWD}/train.py", line=31, function="f", text="os.kill()"),
        SignalSent(at=START + 6, pid=5000 + to, signal=number, site=77),
    ]
    ends = {0: [end(1, START + 6, signal=9)]}
    (finding,) = found(run_of(tmp_path, made, nodes=ends, ended=None))
    assert finding.rule == ("sent-by-rank" if named else "killed-outside")
    assert finding.ranks == (1,)


def test_a_timer_of_its_own(tmp_path: Path) -> None:
    made = tapes()
    made[1].events[:0] = [
        started(1, 2, pid=5001),
        Site(at=START + 1, id=77, file=f"{CWD}/data.py", line=16, function="f"),
        SignalSent(at=START + 1, pid=5001, signal=14, site=77, timer=True),
    ]
    ends = {0: [end(1, START + 6, signal=14)]}
    (finding,) = found(run_of(tmp_path, made, nodes=ends, ended=None))
    assert (finding.rule, finding.ranks) == ("sent-by-rank", (1,))
    assert finding.location is not None and finding.location.line == 16
    assert "timer" in finding.cause and "finally" in finding.fix


def test_ranks_that_died_one_after_the_other(tmp_path: Path) -> None:
    ends = [end(1, START + 6, signal=9), end(0, START + 6.2, signal=9)]
    (finding,) = found(run_of(tmp_path, tapes(), nodes={0: ends}, ended=None))
    assert finding.rule == "killed-outside"
    assert finding.ranks == (0, 1)


def test_the_kernels_counter_confirms_it(tmp_path: Path) -> None:
    seen = [
        MemoryLimit(at=START, oom_kills=2),
        RankSample(at=START + 1, rank=1, pid=5001, rss_bytes=1 << 30),
        RankSample(at=START + 5, rank=1, pid=5001, rss_bytes=7 << 30),
        end(1, START + 6, signal=9),
        MemoryLimit(at=START + 6.1, oom_kills=3),
    ]
    (finding,) = found(run_of(tmp_path, tapes(), nodes={0: seen}, ended=None))
    assert finding.rule == "out-of-memory"
    assert (finding.evidence["memory_first_gib"], finding.evidence["memory_last_gib"]) == (1.0, 7.0)


LOST = ExceptionRaised(
    at=START + 6.1, kind="RuntimeError", message="Connection closed by peer [127.0.0.1]:13209"
)


@pytest.mark.parametrize(
    ("at", "number", "named"), [(6, 9, True), (6, 15, True), (6, 10, False), (2, 9, False)]
)
def test_a_signal_that_nobody_could_see_end_the_process(
    tmp_path: Path, at: float, number: int, named: bool
) -> None:
    """Other launchers do not tell how a process ended; one sent long before did not end it."""
    made = tapes()
    for rank, tape in made.items():
        tape.events.insert(0, started(rank, 2, pid=5000 + rank))
    made[1].events += [
        Site(at=START + 1, id=77, file=f"{CWD}/train.py", line=31, function="f", text="os.kill()"),
        SignalSent(at=START + at, pid=5001, signal=number, site=77),
        Site(at=START + 6, id=78, file=f"{CWD}/train.py", line=32, function="f", text="step()"),
    ]
    nodes = {0: [end(0, START + 6.3), end(1, START + 6.2, silent=True)]}
    (finding,) = found(run_of(tmp_path, made, more={0: [LOST]}, nodes=nodes, ended=None))
    assert finding.rule == ("sent-by-rank" if named else "unknown-end")
    assert (finding.confidence is Confidence.PROVEN) is named


@pytest.mark.parametrize("lost", [True, False])
def test_gone_without_a_word(lost: bool, tmp_path: Path) -> None:
    others = [end(0, START + 6.3), end(2, START + 6.2, signal=15 if lost else None)]
    made = {**tapes(), 2: CallLog(2, 3)}
    nodes = {0: [*others, end(1, START + 6.3, silent=True)]}
    more = {0: [LOST]} if lost else {}
    (finding,) = found(run_of(tmp_path, made, more=more, nodes=nodes, ended=None))
    assert finding.rule == "unknown-end"
    assert (finding.ranks, finding.confidence) == ((1,), Confidence.SUSPECTED)


@pytest.mark.parametrize(
    "why", ["killed because it would not end", "failed", "told to end", "all were", "done"]
)
def test_gone_without_a_word_after_the_others(tmp_path: Path, why: str) -> None:
    late = 30.0 if why.startswith("killed") else 0.1
    own = ExceptionRaised(at=START + 6, kind="ValueError", message="boom")
    ended = end(1, START + 6.3 + late, silent=why != "told to end")
    run = run_of(
        tmp_path,
        tapes(),
        more={
            "failed": {0: [own]},
            "all were": {},
            "done": {0: [RankExiting(at=START + 6.2, how="return")]},
        }.get(why, {0: [LOST]}),
        nodes={0: [end(0, START + 6.3, silent=why == "all were"), ended]},
        ended=None,
    )
    assert found(run) == []


@pytest.mark.parametrize(("at", "status"), [(6.2, None), (6.3, None), (6.4, None), (6.2, 0)])
def test_told_to_end_before_the_others_lost_it(
    tmp_path: Path, at: float, status: int | None
) -> None:
    """One that spawn ends after a rank that lost a peer is not seen to be gone before that one."""
    nodes = {0: [end(1, START + at, status=status), end(0, START + 6.3)]}
    told = found(run_of(tmp_path, tapes(), more={0: [LOST]}, nodes=nodes, ended=None))
    assert len(told) == (at < 6.3 and status is None)
    for finding in told:
        assert (finding.ranks, finding.confidence) == ((1,), Confidence.SUSPECTED)


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
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    more = {
        r: [GroupDestroyed(at=START + 5), RankExiting(at=START + 6, how="return")] for r in made
    }
    assert found(run_of(tmp_path, made, more=more, ended={1: -6})) == []


@pytest.mark.parametrize("left", [True, False])
def test_a_crash_of_the_program_after_its_groups_are_gone(tmp_path: Path, left: bool) -> None:
    """It goes on by itself and exports, say; also in what Python calls as it leaves."""
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    crash = [stood(1, 40, "write(model)", crashed=True)] if left else []
    more = {
        r: [*steps(8), GroupDestroyed(at=START + 5)]
        + [RankExiting(at=START + 6, how="return")] * (left or r == 0)
        for r in made
    }
    ends = [end(1, START + 9, signal=11), end(0, START + 9.1, signal=15, by_launcher=True)]
    run = run_of(tmp_path, made, more=more, nodes={0: [*ends, *crash]}, ended=None)
    (finding,) = found(run)
    assert finding.rule == "native-crash"
    assert (finding.severity, finding.ranks, finding.steps) == (Severity.ERROR, (1,), None)
    assert not list(FirstFailure().examine(run))


@pytest.mark.parametrize(
    ("number", "later", "both"),
    [(14, 0.1, True), (9, 0.1, True), (9, 30.0, False), (15, 0.1, False), (11, 0.1, True)],
)
def test_what_the_launcher_does_not_send_was_its_own_end(
    tmp_path: Path, number: int, later: float, both: bool
) -> None:
    ends = [
        end(1, START + 9, signal=number),
        end(0, START + 9 + later, signal=number, by_launcher=True),
    ]
    (finding,) = found(run_of(tmp_path, tapes(), nodes={0: ends}, ended=None))
    assert finding.ranks == ((0, 1) if both else (1,))


def test_a_crash_as_it_was_told_to_end_is_none_of_its_own(tmp_path: Path) -> None:
    ends = [end(1, START + 9, signal=9), end(0, START + 9.1, signal=6, by_launcher=True)]
    run = run_of(tmp_path, tapes(), nodes={0: ends}, ended=None)
    assert run.ranks[0].ended is not None
    assert run.ranks[0].ended.by_launcher


def test_a_death_as_the_interpreter_leaves_has_no_step_and_no_line(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    more = {r: [*steps(8), RankExiting(at=START + 6, how="return")] for r in made}
    (finding,) = found(run_of(tmp_path, made, more=more, ended={0: -14, 1: -14}))
    assert finding.rule == "killed-outside"
    assert (finding.ranks, finding.steps, finding.location) == ((0, 1), None, None)


@pytest.mark.parametrize("late", [-0.1, 0.0, 0.2, 20.0])
def test_told_to_end_after_an_abort_at_teardown(tmp_path: Path, late: float) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    more = {1: [GroupDestroyed(at=START + 5), RankExiting(at=START + 5.5, how="return")]}
    ends = [end(1, START + 6, signal=6), end(0, START + 6 + late, signal=15)]
    told = found(run_of(tmp_path, made, more=more, nodes={0: ends}, ended=None))
    assert [f.ranks for f in told] == ([(0,)] if late > 5 else [])


def test_told_to_end_with_no_abort_before(tmp_path: Path) -> None:
    more = {1: [GroupDestroyed(at=START + 5)]}
    ends = [end(0, START + 6, signal=15), end(1, START + 6.2, signal=9)]
    (finding,) = found(run_of(tmp_path, tapes(), more=more, nodes={0: ends}, ended=None))
    assert finding.rule == "killed-outside"
    assert finding.ranks == (0,)


@pytest.mark.parametrize(("pid", "known"), [(5000, True), (7, False)])
@pytest.mark.parametrize("zombie", [None, 15])
def test_spawn_says_which_ended_first(
    tmp_path: Path, pid: int, known: bool, zombie: int | None
) -> None:
    """Rank 0 is told to end, rank 1 loses it, and spawn tells rank 2 to end."""
    made = {rank: CallLog(rank, 3).call(line=9) for rank in range(3)}
    for rank, tape in made.items():
        tape.events.insert(0, started(rank, 3, spawned=4))
    told = SpawnEnded(at=START + 7, wall=WALL, pid=pid, signal=15, told=(5002,))
    ends = [end(0, START + 6), end(1, START + 6.5), end(2, START + 6, signal=zombie), told]
    run = run_of(tmp_path, made, more={1: [LOST]}, nodes={0: ends}, ended=None)
    findings = found(run)
    if known:
        assert [(f.ranks, f.confidence) for f in findings] == [((0,), Confidence.PROVEN)]
        assert findings[0].subjects == ("SIGTERM",)
    else:
        assert [f.confidence for f in findings] == [Confidence.SUSPECTED]


def test_spawn_says_with_what_status_a_rank_left(tmp_path: Path) -> None:
    ends = [end(0, START + 6, silent=True), end(1, START + 6.5)]
    left = SpawnEnded(at=START + 7, wall=WALL, pid=5000, status=7, told=(5001,))
    lost = msgspec.structs.replace(LOST, at=START + 5.9)  # before its end was seen
    run = run_of(tmp_path, tapes(), more={1: [lost]}, nodes={0: [*ends, left]}, ended=None)
    assert found(run) == []
    assert run.ranks[0].exit_code == 7
    assert outcome(run, 1, "") == "failed"
    (finding,) = FirstFailure().examine(run)
    assert finding.rule == "exit-status"
    assert finding.ranks == (0,) and "exit status 7" in finding.summary
    (after,) = finding.evidence["consequences"]  # type: ignore[misc]
    assert after["seconds_later"] == 0


@pytest.mark.parametrize("name", ["rank-1.jsonl", None])
def test_its_record_is_lost(tmp_path: Path, name: str | None) -> None:
    """It is empty, or not there; how the process ended is known."""
    peer = ExceptionRaised(at=START + 6.1, kind="RuntimeError", message="Connection reset by peer")
    ends = [end(1, START + 6, signal=9), end(0, START + 6.2, signal=15, by_launcher=True)]
    tapes_of_0 = {0: CallLog(0, 2).call(line=9)}
    run = run_of(tmp_path, tapes_of_0, nodes={0: ends}, more={0: [peer]}, world_size=2)
    if name:
        (tmp_path / "run" / name).touch()
        run = load([RunFolder(tmp_path / "run")])
        (_, row) = diagnose(run, [RankDied()]).ranks
        assert (row.state, row.signal, row.pid) == ("killed", "SIGKILL", 5001)
    (finding,) = found(run)
    assert finding.rule == "killed-outside"
    assert (finding.ranks, finding.subjects) == ((1,), ("SIGKILL",))
    told = [f for f in FirstFailure().examine(run) if not RankDied().explains(finding, f)]
    assert not told


def test_a_process_of_another_group_is_not_without_a_record(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: CallLog(0, 1)}, nodes={0: [end(1, START + 6, signal=9)]})
    other = Rank(1)
    run.others = (other,)
    assert not run.unrecorded
    assert not found(run)


@pytest.mark.parametrize(("ended", "told"), [(6.0, False), (8.0, True)])
def test_told_to_end_after_another_had_failed(tmp_path: Path, ended: float, told: bool) -> None:
    """By torchrun inside the command, which nobody could ask; or that other lost this one."""
    peer = ExceptionRaised(at=START + 5, kind="RuntimeError", message="Connection refused")
    ends = [end(0, START + ended, status=1), end(1, START + 6.5, signal=15)]
    run = run_of(tmp_path, tapes(), nodes={0: ends}, more={0: [peer]})
    assert [f.subjects for f in found(run)] == [("SIGTERM",)] * told


@pytest.mark.parametrize(
    ("status", "first", "later", "over"),
    [(124, 15, 0, True), (1, 15, 0, False), (124, 9, 0, False), (124, 15, 60, False)],
)
def test_the_time_of_the_command_is_over(
    tmp_path: Path, status: int, first: int, later: float, over: bool
) -> None:
    """Who was told to end with the others need not be seen to end by a signal."""
    nodes = {0: [end(0, START + 6, signal=first), end(1, START + 6 + later)]}
    run = run_of(tmp_path, tapes(), nodes=nodes, ended=None, exit_code=status)
    (finding,) = found(run)
    assert finding.rule == ("time-limit" if over else "killed-outside")
    assert finding.ranks == ((0, 1) if over else (0,))


def test_a_rank_that_had_failed_when_the_time_was_over(tmp_path: Path) -> None:
    nodes = {0: [end(0, START + 6, status=1), end(1, START + 9, signal=15)]}
    own = ExceptionRaised(at=START + 5.5, kind="ValueError", message="boom")
    run = run_of(tmp_path, tapes(), more={0: [own]}, nodes=nodes, ended=None, exit_code=124)
    assert found(run) == []


def test_it_stood_still_when_the_time_was_over(tmp_path: Path) -> None:
    stood_still = StallSeen(at=START + 40, since=START + 5, hang_after=30)
    nodes = {0: [stood_still, *(end(r, START + 60, signal=15) for r in (0, 1))]}
    for status in (124, 1):
        run = run_of(tmp_path / str(status), tapes(), nodes=nodes, ended=None, exit_code=status)
        assert len(found(run)) == (status != 124)
