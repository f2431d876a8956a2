"""DDP608 over literal calls, and each of its traps."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.hang.data_stall import DataStall
from recordings import site
from tapes import START, CallLog, run_of, stall, stood

from ddpdoctor.events import ExceptionRaised, Frame, LoaderSeen, StackFrame, Stopped, Worker
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import Phase, State


def found(run: Run) -> list[Finding]:
    return list(DataStall().examine(run))


def starving(tmp_path: Path, *workers: Worker, seen: bool = True) -> Run:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=9, state=State.BEGUN, at=START + 5)
    made[1].now(Phase.DATA, 6, "for batch in loader:")
    loader = LoaderSeen(at=START, loader=0, site=-1, loop_site=90, dataset="Images", length=64,
                        sampler="RandomSampler", workers=2)  # fmt: skip
    frames = [stood(1, 6, "for batch in loader:", workers=workers), stall(START + 50, START + 5)]
    nodes = {0: frames} if seen else {}
    return run_of(tmp_path, made, more={1: [loader]}, nodes=nodes, ended={0: -15, 1: -15})


def test_workers_in_a_lock(tmp_path: Path) -> None:
    asleep = [Worker(pid=n, state="S", cpu_s=0.1, waits_in="futex_wait_queue") for n in (7, 8)]
    (finding,) = found(starving(tmp_path, *asleep))
    assert finding.rule == "worker-lock"
    assert finding.ranks == (1,)
    assert finding.subjects == ("Images",)
    assert finding.location is not None
    assert finding.location.line == 6


@pytest.mark.parametrize(
    ("channel", "rule"),
    [("futex_do_wait", "worker-lock"), ("pipe_read", "workers-stalled"),
     ("hrtimer_nanosleep", "worker-sleeps")],
)  # fmt: skip
def test_the_line_at_which_a_worker_stands(tmp_path: Path, channel: str, rule: str) -> None:
    """The other worker waits for work: it runs no code of the user's."""
    idle = StackFrame(file="/usr/lib/python3.11/selectors.py", line=415, function="select")
    frames = (
        StackFrame(file="/x/data.py", line=8, function="read", user=True, text="with lock:"),
        StackFrame(file="/x/data.py", line=4, function="__getitem__", user=True),
    )
    workers = [
        Worker(pid=7, state="S", cpu_s=0.1, waits_in="poll_schedule_timeout", frames=(idle,)),
        Worker(pid=8, state="S", cpu_s=0.1, waits_in=channel, frames=frames),
    ]
    (finding,) = found(starving(tmp_path, *workers))
    assert finding.rule == rule
    assert finding.location is not None
    assert (finding.location.line, finding.location.source) == (8, "with lock:")
    assert finding.related[0].label == "the loop over the loader"


def test_a_worker_that_sleeps_in_code_of_its_own(tmp_path: Path) -> None:
    channels = ("hrtimer_nanosleep", "poll_schedule_timeout")
    workers = [Worker(pid=7 + n, state="S", cpu_s=0.1, waits_in=c) for n, c in enumerate(channels)]
    (finding,) = found(starving(tmp_path, *workers))
    assert finding.rule == "worker-sleeps"


@pytest.mark.parametrize(
    ("channels", "states", "rule"),
    [
        (("locks_lock_inode_wait",) * 2, "SS", "file-lock"),
        (("do_lock_file_wait", "pipe_read"), "SS", "file-lock"),
        (("locks_lock_inode_wait", ""), "SR", "workers-stalled"),  # it has the lock, and works
        (("locks_lock_inode_wait", "hrtimer_nanosleep"), "SS", "worker-sleeps"),
        (("pipe_read", "pipe_read"), "SS", "workers-stalled"),
    ],
)
def test_workers_that_wait_for_a_lock_on_a_file(
    tmp_path: Path, channels: tuple[str, str], states: str, rule: str
) -> None:
    workers = [
        Worker(pid=7 + n, state=states[n], cpu_s=0.1, waits_in=c) for n, c in enumerate(channels)
    ]
    (finding,) = found(starving(tmp_path, *workers))
    assert finding.rule == rule


def test_where_it_waited_until_it_was_interrupted(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=9, state=State.BEGUN, at=START + 5)
    made[1].now(Phase.LEAVING)
    made[1].progress_at = START + 90
    loop = site(90, "train.py", 6, "for batch in loader:")
    loader = LoaderSeen(at=START, loader=0, site=-1, loop_site=90, dataset="Images", length=64,
                        sampler="RandomSampler", workers=2)  # fmt: skip
    then = stood(1, 6, "for batch in loader:", phase=Phase.DATA, phase_site=90, still_s=45.0)
    seen = [then, stall(START + 50, START + 5), Stopped(at=START + 89, by="interrupt")]
    run = run_of(tmp_path, made, more={1: [loop, loader]}, nodes={0: seen}, ended={0: -2, 1: -2})
    (finding,) = found(run)
    assert finding.rule == "workers-stalled"
    assert str(finding.location) == "train.py:6"


def test_workers_that_are_gone(tmp_path: Path) -> None:
    (finding,) = found(starving(tmp_path, Worker(pid=7, state="S", cpu_s=0.1)))
    assert finding.rule == "workers-stalled"


def test_without_workers_the_line_is_the_data_sets_own(tmp_path: Path) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    made[0].call(line=9, state=State.BEGUN, at=START + 5)
    made[1].now(Phase.DATA, 6, "for batch in loader:")
    loader = LoaderSeen(at=START, loader=0, site=-1, loop_site=90, dataset="Images", length=64,
                        sampler="RandomSampler", workers=0)  # fmt: skip
    seen = [stood(1, 33, "os.read(pipe, 1)"), stall(START + 50, START + 5)]
    run = run_of(tmp_path, made, more={1: [loader]}, nodes={0: seen}, ended={0: -15, 1: -15})
    (finding,) = found(run)
    assert finding.rule == "no-workers"
    assert str(finding.location) == "train.py:33"
    assert [str(r.location) for r in finding.related] == ["train.py:6", "train.py:9"]


def test_a_slow_batch(tmp_path: Path) -> None:
    assert found(starving(tmp_path, seen=False)) == []


@pytest.mark.parametrize("line", [6, 8])
def test_a_worker_that_died(tmp_path: Path, line: int) -> None:
    made = {rank: CallLog(rank, 2).call(line=9) for rank in range(2)}
    raised = ExceptionRaised(
        at=START + 5,
        kind="RuntimeError",
        message="DataLoader worker (pid 77) is killed by signal: Killed. ",
        frames=(Frame(file="/home/user/project/train.py", line=line, function="main", user=True),),
    )  # fmt: skip
    made[1].now(Phase.DATA, 6, "for batch in loader:")
    loader = LoaderSeen(at=START, loader=0, site=-1, loop_site=90, dataset="Images", length=64,
                        sampler="RandomSampler", workers=2)  # fmt: skip
    run = run_of(tmp_path, made, more={1: [loader, raised]}, ended={0: -15, 1: 1})
    (finding,) = found(run)
    assert finding.rule == "worker-died"
    assert finding.ranks == (1,)
    assert finding.location is not None
    assert finding.location.line == 6
    assert [r.location.line for r in finding.related] == [8] * (line == 8)
