"""DDP603 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.rank_missing import RankMissing
from ddpdoctor.checks.hang.stall import Stall
from recordings import PID, steps
from tapes import CWD, START, CallLog, run_of, stall, stood

from ddpdoctor.events import (
    ExceptionRaised,
    FlightEntry,
    FlightLog,
    Frame,
    InitEntered,
    SignalSent,
    Site,
    StackFrame,
    StallOver,
    ThreadFailed,
)
from ddpdoctor.report.findings import Confidence, Finding, Steps
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import Phase, State


def found(run: Run) -> list[Finding]:
    return list(RankMissing().examine(run))


def waiting(world: int = 3, missing: int = 1) -> dict[int, CallLog]:
    made = {rank: CallLog(rank, world) for rank in range(world)}
    for rank, tape in made.items():
        tape.call(line=9)
        if rank != missing:
            tape.call(line=9, state=State.BEGUN, at=START + 5)
    return made


def test_it_is_somewhere_else(tmp_path: Path) -> None:
    seen = [stood(1, 33, "time.sleep(1000)"), stall(START + 50, START + 5)]
    run = run_of(tmp_path, waiting(), nodes={0: seen}, ended={0: -15, 1: -15, 2: -15})
    (finding,) = found(run)
    assert finding.rule == "idle"
    assert finding.ranks == (1,)
    assert finding.confidence is Confidence.SUSPECTED
    assert finding.location is not None
    assert (finding.location.line, finding.location.source) == (33, "time.sleep(1000)")
    assert finding.evidence["waiting"] == [
        {"ranks": "0,2", "where": "in all_reduce (train.py:9)", "seconds": 95.0}
    ]


@pytest.mark.parametrize(
    ("head", "inner", "cpu", "told"),
    [
        ("with lock(path):", "__enter__", 0.0, True),
        ("with lock(path):", "__exit__", 0.0, False),
        ("with lock(path):", "__enter__", 0.9, False),  # it is loading something
        ("with lock(path):", "", 0.0, True),
        ("with other(path):", "__enter__", 0.0, False),
    ],
)
def test_a_lock_that_a_waiting_rank_holds(
    tmp_path: Path, head: str, inner: str, cpu: float, told: bool
) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call("barrier", 20, inside=((16, "with lock(path):"),), state=State.BEGUN, at=START + 5)
    line = 16 if "lock" in head else 12
    frames = [StackFrame(file=f"{CWD}/train.py", line=line, function="main", user=True, text=head)]
    if inner:
        frames.insert(0, StackFrame(file="/usr/lib/contextlib.py", line=1, function=inner))
        flock = f"{CWD}/lock.py"
        frames.insert(0, StackFrame(file=flock, line=3, function="lock", user=True, text="flock()"))
    seen = [stood(1, 16, head, frames=tuple(frames), cpu=cpu), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended={0: -15, 1: -15}))
    assert (finding.rule == "lock") is told
    assert (head in [r.location.source for r in finding.related]) is told


@pytest.mark.parametrize("done", [0, 3])
def test_the_step_in_which_it_is(tmp_path: Path, done: int) -> None:
    made = waiting()
    for tape in made.values():
        tape.events += steps(done)
    run = run_of(tmp_path, made, nodes={0: [stall(START + 50, START + 5)]}, ended=None)
    (finding,) = found(run)
    assert finding.rule == "unobserved"
    assert finding.steps == (Steps(3, 3, 1) if done else None)


@pytest.mark.parametrize(
    ("failed_at", "cpu", "told"), [(2, 0.0, True), (60, 0.0, False), (2, 0.9, False)],
    ids=["", "later than the stall", "while the rank computes"],
)  # fmt: skip
def test_a_thread_that_it_may_wait_for_has_failed(
    tmp_path: Path, failed_at: float, cpu: float, told: bool
) -> None:
    made = waiting()
    frames = (Frame(file="/w/train.py", line=20, function="prepare", user=True),)
    made[1].events.append(
        ThreadFailed(
            at=START + failed_at, thread="prefetch", kind="OSError", message="no space",
            frames=frames,
        )
    )  # fmt: skip
    seen = [stood(1, 33, "queue.get()", cpu=cpu), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended=None))
    assert (finding.rule == "failed-thread") is told
    spots = [r.location.line for r in finding.related if "prefetch" in r.label]
    assert spots == [20] * told


def test_stopped_by_a_signal(tmp_path: Path) -> None:
    seen = [stood(1, 33, "x = f(x)", state="T"), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, waiting(), nodes={0: seen}, ended=None))
    assert finding.rule == "stopped"


@pytest.mark.parametrize(
    ("by", "at", "signal", "told"),
    [(1, 6, 19, True), (0, 6, 19, True), (1, 6, 10, False), (1, 2, 19, False)],
    ids=["by itself", "by another", "another signal", "it went on after that"],
)
def test_the_line_that_sent_the_signal_is_shown(
    tmp_path: Path, by: int, at: float, signal: int, told: bool
) -> None:
    made = waiting()
    line = Site(at=START, id=70, file=f"{CWD}/train.py", line=44, function="main", text="os.kill()")
    made[by].events += [line, SignalSent(at=START + at, pid=PID + 1, signal=signal, site=70)]
    made[1].progress_at = START + 5.5
    seen = [stood(1, 33, "x = f(x)", state="T", still_s=44.5), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended=None))
    assert finding.rule == "stopped"
    assert finding.location is not None
    assert finding.location.line == (44 if told else 33)


def test_where_no_stack_could_be_taken_it_was_last_seen(tmp_path: Path) -> None:
    made = waiting()
    made[1].now(Phase.USER, 30, "optimizer.step()")
    seen = [stood(1, 33, "", state="T", frames=()), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended=None))
    assert finding.rule == "stopped"


def test_the_backends_timeout_proves_it(tmp_path: Path) -> None:
    made = waiting(2)
    group, index, signature, site, peer, _, began, _ = made[0].calls[-1]
    made[0].calls[-1] = (group, index, signature, site, peer, State.FAILED, began, began + 6)
    raised = ExceptionRaised(
        at=START + 11.01, kind="RuntimeError", message="Timed out waiting 6000ms for recv operation"
    )
    entered = InitEntered(
        at=START, backend="gloo", init_method="", rank=-1, world_size=-1, env_rank=0,
        env_world_size=2, env_local_rank=0, timeout_s=6.0, site=-1,
    )  # fmt: skip
    kept = stood(1, 33, "save(model)", state="")  # the stack that it left, and no more
    more = {0: [entered, raised]}
    run = run_of(tmp_path, made, more=more, ended={0: 1, 1: -15}, nodes={0: [kept]})
    (finding,) = found(run)
    assert finding.rule == "unobserved"
    assert finding.ranks == (1,)
    assert finding.confidence is Confidence.PROVEN
    assert finding.evidence["cpu_share_of_missing"] is None


def test_shorter_than_the_stall_time(tmp_path: Path) -> None:
    assert found(run_of(tmp_path, waiting(), now=START + 12)) == []


def test_it_came_back(tmp_path: Path) -> None:
    seen = [stall(START + 50, START + 5), StallOver(at=START + 60, lasted_s=55)]
    assert found(run_of(tmp_path, waiting(), nodes={0: seen}, ended=None)) == []


def test_it_came_back_and_the_run_ended_before_that_was_seen(tmp_path: Path) -> None:
    seen = [stall(START + 50, START + 5)]
    made = waiting()
    for tape in made.values():
        tape.call(line=9, at=START + 51)
    assert found(run_of(tmp_path, made, nodes={0: seen})) == []
    assert found(run_of(tmp_path / "killed", made, nodes={0: seen}, ended={0: -9, 1: -9})) == []


def test_a_barrier_with_a_timeout_of_its_own(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    made[0].call("monitored_barrier", 9, state=State.BEGUN, at=START + 5)
    seen = [stood(1, 33, "save(model)"), stall(START + 50, START + 5)]
    (finding,) = found(run_of(tmp_path, made, nodes={0: seen}, ended={0: -15, 1: -15}))
    assert finding.rule == "idle"


def recorded(*retired: bool) -> FlightLog:
    entries = tuple(
        FlightEntry(sequence=n, op="all_reduce", sizes="[[4]]", dtypes="Float", retired=over)
        for n, over in enumerate(retired)
    )
    return FlightLog(at=START + 20, group="0", entries=entries, last_enqueued=len(retired) - 1)


@pytest.mark.parametrize(
    ("logs", "ranks"),
    [
        ((recorded(True), recorded(True, False)), (0,)),
        ((recorded(True, True), recorded(True, False)), None),
        ((recorded(True, False), recorded(True, False)), None),
        ((recorded(True), recorded(True)), None),
    ],
)
def test_in_its_own_code_within_the_backward_in_which_the_other_waits(
    tmp_path: Path, logs: tuple[FlightLog, FlightLog], ranks: tuple[int, ...] | None
) -> None:
    made = {rank: CallLog(rank, 2) for rank in range(2)}
    for tape in made.values():
        tape.call("DDP backward", 12).call("DDP backward", 12, state=State.BEGUN, at=START + 5)
    seen = [stood(0, 33, "time.sleep(1000)"), stall(START + 50, START + 5)]
    more = {rank: [log] for rank, log in enumerate(logs)}
    run = run_of(tmp_path, made, more=more, nodes={0: seen}, ended={0: -15, 1: -15})
    missing = found(run)
    assert [f.ranks for f in missing] == ([ranks] if ranks else [])
    stalled = list(Stall().examine(run))
    assert bool(stalled) is not bool(missing)
    if missing:
        assert missing[0].location is not None
        assert missing[0].location.line == 33


@pytest.mark.parametrize(
    ("frames", "cpu", "rule"),
    [
        ((("train.py", "main", True, 'name = input("name? ")'),), 0.0, "input"),
        ((("getpass.py", "getpass", False, ""), ("train.py", "main", True, "login()")), 0.0,
         "input"),
        ((("train.py", "main", True, 'name = input("name? ")'),), 0.9, "busy"),
        ((("train.py", "main", True, "model(batch.model_input())"),), 0.0, "idle"),
        ((("train.py", "read", True, "queue.get()"), ("train.py", "main", True, "input(x)")), 0.0,
         "idle"),
    ],
)  # fmt: skip
def test_no_longer_timeout_for_a_rank_that_waits_for_a_person(
    tmp_path: Path, frames: tuple[tuple[str, str, bool, str], ...], cpu: float, rule: str
) -> None:
    stack = tuple(
        StackFrame(file=f"{CWD}/{file}", line=33, function=function, user=user, text=text)
        for file, function, user, text in frames
    )
    seen = [stood(1, 33, "", frames=stack, cpu=cpu), stall(START + 50, START + 5)]
    run = run_of(tmp_path, waiting(), nodes={0: seen}, ended={0: -15, 1: -15, 2: -15})
    (finding,) = found(run)
    assert finding.rule == rule
    assert ("timeout=" in finding.fix) is (rule != "input")


def test_the_exception_of_a_program_that_ended_while_a_thread_goes_on(tmp_path: Path) -> None:
    made = waiting()
    frames = (Frame(file=f"{CWD}/train.py", line=20, function="main", user=True),)
    made[1].events.append(
        ExceptionRaised(at=START + 3, kind="IndexError", message="index 7", frames=frames)
    )
    ends = StackFrame(file="/usr/lib/python3.11/threading.py", line=1, function="_shutdown")
    seen = [stood(1, 0, "", frames=(ends,), threads=("writer",)), stall(START + 50, START + 5)]
    run = run_of(tmp_path, made, nodes={0: seen}, ended={0: -15, 1: -15, 2: -15})
    (finding,) = found(run)
    assert finding.rule == "ended"
    assert "timeout=" not in finding.fix
    assert all(part in finding.cause for part in ("IndexError: index 7", "train.py:20", "writer"))
