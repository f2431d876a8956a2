"""The monitor over real processes of its own, no torch."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdoctor.config import Options
from ddpdoctor.events import (
    SCHEMA,
    Event,
    MemoryLimit,
    MonitorStarted,
    ProcessEnded,
    ProcessState,
    RankExiting,
    RankSample,
    RankStarted,
    Stopped,
)
from ddpdoctor.monitor import monitor, system
from ddpdoctor.monitor.monitor import Monitor
from ddpdoctor.storage.run_folder import EventWriter, Lines, RunFolder, rank_stem


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import time; held = b'x' * 30_000_000; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait(10)


def _rank_file(folder: Path, rank: int, pid: int, *more: Event) -> None:
    writer = EventWriter(folder / f"{rank_stem(rank, 2)}.jsonl")
    writer.write(
        RankStarted(
            at=time.monotonic(),
            schema=SCHEMA,
            wall=time.time(),
            rank=rank,
            local_rank=rank,
            world_size=2,
            pid=pid,
            node=platform.node(),
        )
    )
    for event in more:
        writer.write(event)
    writer.close()


def _monitor(folder: Path) -> Monitor:
    made = Monitor(RunFolder(folder), 0, Options(), launcher="exec")
    made.start()
    return made


def _seen(folder: Path, kind: type[Event]) -> list[Event]:
    return [e for e in Lines(folder / "node-0.jsonl").events() if isinstance(e, kind)]


def _until(condition: Callable[[], object], watched: Monitor, limit_s: float = 15) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        watched.tick()
        time.sleep(0.05)


def test_memory_is_sampled(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    _rank_file(tmp_path, 1, sleeper.pid)
    watched = _monitor(tmp_path)
    _until(
        lambda: any(
            isinstance(e, RankSample) and e.rss_bytes > 30_000_000
            for e in _seen(tmp_path, RankSample)
        ),
        watched,
    )
    watched.finish()
    assert not watched.troubles
    first = _seen(tmp_path, MonitorStarted)[0]
    assert isinstance(first, MonitorStarted) and first.memory_bytes > 0 and first.cores > 0
    assert len(_seen(tmp_path, MemoryLimit)) >= 2  # at the start and at the end


@pytest.mark.parametrize(
    ("dump", "signum", "silent"),
    [
        ("", None, True),
        (
            "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent",
            signal.SIGSEGV,
            False,
        ),
        ("Current thread 0x00007f (most recent call first):\n", None, False),
        (None, None, True),
    ],
)
def test_an_end_that_nobody_could_wait_for(
    dump: str | None, signum: int | None, silent: bool, tmp_path: Path
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    _rank_file(tmp_path, 1, process.pid)
    if dump is not None:
        (tmp_path / "rank-1.stacks.txt").write_text(dump)
    process.wait(10)
    watched = _monitor(tmp_path)
    watched.finish()
    (ended,) = _seen(tmp_path, ProcessEnded)
    assert isinstance(ended, ProcessEnded)
    assert (ended.status, ended.signal, ended.silent) == (None, signum, silent)


def test_a_rank_that_said_that_it_leaves_did_not_vanish(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    leaving = RankExiting(at=time.monotonic(), how="return")
    _rank_file(tmp_path, 1, process.pid, leaving)
    process.wait(10)
    watched = _monitor(tmp_path)
    watched.finish()
    (ended,) = _seen(tmp_path, ProcessEnded)
    assert isinstance(ended, ProcessEnded)
    assert (ended.status, ended.signal, ended.silent) == (None, None, False)


def test_the_end_of_a_zombie_that_nobody_could_wait_for(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """The threads of a process that was told to end may outlive the main one for a moment."""
    _rank_file(tmp_path, 1, sleeper.pid)
    watched = _monitor(tmp_path)
    watched.tick()
    sleeper.terminate()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    watched.finish()
    (ended,) = _seen(tmp_path, ProcessEnded)
    assert isinstance(ended, ProcessEnded) and ended.signal == signal.SIGTERM


def test_memory_of_descendants_is_counted(tmp_path: Path) -> None:
    child = "held = b'x' * 40_000_000; import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 15
        tree = system.Tree()
        while True:
            tree.look()
            use = tree.memory(process.pid)
            if use and use.children > 40_000_000:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(use.pids) == 2
        assert use.own < 40_000_000
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_processes_that_stay_are_asked_for_their_parent_once(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    stat = system.stat
    monkeypatch.setattr(system, "stat", lambda pid: asked.append(pid) or stat(pid))
    tree = system.Tree()
    for _ in range(3):
        tree.look()
    assert asked.count(sleeper.pid) == asked.count(os.getpid()) == 1
    use = tree.memory(os.getpid())
    assert use and sleeper.pid in use.pids
    sleeper.kill()
    sleeper.wait(10)
    tree.look()
    use = tree.memory(os.getpid())
    assert use and sleeper.pid not in use.pids


def test_a_stopped_process_is_noticed(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    _rank_file(tmp_path, 0, sleeper.pid)
    watched = _monitor(tmp_path)
    watched.tick()
    assert not _seen(tmp_path, ProcessState)
    sleeper.send_signal(signal.SIGSTOP)
    _until(lambda: watched.watched[sleeper.pid].state == "T", watched)
    sleeper.send_signal(signal.SIGCONT)
    _until(lambda: watched.watched[sleeper.pid].state != "T", watched)
    states = [e.state for e in _seen(tmp_path, ProcessState) if isinstance(e, ProcessState)]
    assert states[0] == "T" and states[-1] != "T" and len(states) == 2


def test_an_end_is_written_once_with_what_is_known(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    _rank_file(tmp_path, 1, sleeper.pid)
    watched = _monitor(tmp_path)
    watched.tick()
    assert watched.rank_pids() == {sleeper.pid}
    sleeper.kill()
    # Nobody has collected it yet: its status can be read while it is a zombie.
    _until(lambda: watched.watched[sleeper.pid].exit_code is not None, watched)
    sleeper.wait(10)
    _until(lambda: _seen(tmp_path, ProcessEnded), watched)
    watched.finish()
    (end,) = _seen(tmp_path, ProcessEnded)
    assert isinstance(end, ProcessEnded)
    assert (end.rank, end.pid, end.signal, end.status) == (1, sleeper.pid, 9, None)
    assert watched.rank_pids() == set()


def test_processes_of_a_rank_one_after_the_other_end_each_on_its_own(tmp_path: Path) -> None:
    watched = _monitor(tmp_path)
    for status in (3, 0):
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _rank_file(tmp_path, 1, process.pid)
        (tmp_path / "rank-1.jsonl").rename(tmp_path / f"rank-1.pid-{process.pid}.jsonl")
        watched.tick()
        process.wait(10)
        _until(lambda pid=process.pid: pid in watched._recorded, watched)  # type: ignore[misc]
        watched.tick()  # which reads that back
    watched.finish()
    ends = [e.status for e in _seen(tmp_path, ProcessEnded) if isinstance(e, ProcessEnded)]
    assert ends == [3, 0]


def test_a_reused_pid_is_another_process(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _rank_file(tmp_path, 0, sleeper.pid)
    watched = _monitor(tmp_path)
    watched.tick()
    real = system.stat(sleeper.pid)
    assert real is not None
    other = system.Stat("R", real.parent, real.born + 500, None)
    monkeypatch.setattr(system, "stat", lambda pid: other)
    watched.tick()
    assert watched.watched[sleeper.pid].gone is not None


def test_samples_thin_out_as_a_run_gets_long(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _rank_file(tmp_path, 0, sleeper.pid)
    clock = [1000.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: clock[0])
    watched = _monitor(tmp_path)

    def written_in(seconds: int) -> int:
        before = len(_seen(tmp_path, RankSample))
        for _ in range(seconds):
            clock[0] += 1
            watched.tick()
        return len(_seen(tmp_path, RankSample)) - before

    assert written_in(20) == 20
    clock[0] += 86_400
    assert written_in(150) == 2  # the rule allows one in 144 s
    sleeper.kill()
    sleeper.wait(10)
    assert written_in(1) == 1  # the last one before the end, whatever the rule


def test_an_error_of_its_own_never_gets_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = _monitor(tmp_path)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(watched.recording, "refresh", broken)
    assert watched.tick() is None
    assert watched.tick() is None
    assert watched.troubles == ["RuntimeError('broken')"]
    watched.stopped("interrupt", "SIGINT")
    watched.finish()
    assert _seen(tmp_path, Stopped)


def test_control_group_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "proc" / "self"
    group.mkdir(parents=True)
    (group / "cgroup").write_text("0::/on/the/host\n")
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "memory.current").write_text("100\n")
    (root / "memory.max").write_text("max\n")
    (root / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    monkeypatch.setattr(system, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(system, "_GROUPS", root)
    assert system.control_group_memory() == system.GroupMemory(None, 100, 3)
    (root / "memory.max").write_text("4096\n")
    assert system.control_group_memory().limit == 4096
