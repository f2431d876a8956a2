"""`ddpdoctor attach` on real processes: ranks found by their environment, stacks from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from commands import Caught, refused
from msgspec.structs import replace

from ddpdoctor.attach import jobs, stacks
from ddpdoctor.attach.records import Frame, Look, RankLook
from ddpdoctor.attach.verdict import judge
from ddpdoctor.cli import main

CODE = """\
import sys, time
def wait_for_ever():
    time.sleep(1000)  # of no use
print("there", flush=True)
wait_for_ever()
"""


@contextlib.contextmanager
def ranks(
    words: Sequence[str], number: int, **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes with the environment of ranks, once they have printed a line."""
    started = []
    try:
        for n in range(number):
            given = {"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(number)}
            process = subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **given, **environment},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            started.append(process)
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with the environment of ranks; the second one has a child with the same."""
    script = tmp_path / "train.py"
    script.write_text(CODE)
    child = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}])"
    started = []
    for number in (0, 1):
        given = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nowhere",
                 "MASTER_PORT": str(os.getpid())}  # fmt: skip
        words = [sys.executable, str(script)] if number == 0 else [sys.executable, "-c", child]
        process = subprocess.Popen(words, env={**os.environ, **given}, stdout=subprocess.PIPE,
                                   start_new_session=True)  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        started.append(process)
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def test_ranks_are_found_without_their_children(job: list[subprocess.Popen[bytes]]) -> None:
    (found,) = [j for j in jobs.find().jobs if j.address == f"nowhere:{os.getpid()}"]
    assert [(p.rank, p.pid) for p in found.ranks] == [(n, p.pid) for n, p in enumerate(job)]
    assert (found.world_size, found.launched) == (2, 2)


def test_the_pid_of_one_rank_stands_for_its_job(job: list[subprocess.Popen[bytes]]) -> None:
    (child,) = psutil.Process(job[1].pid).children()
    for pid in (job[0].pid, job[1].pid, child.pid):
        (found,) = jobs.find([pid]).jobs
        assert [p.pid for p in found.ranks] == [p.pid for p in job]


def test_a_pid_that_is_no_rank_is_named(job: list[subprocess.Popen[bytes]], capsys: Caught) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            found = jobs.find([job[0].pid, other.pid])
            assert (len(found.jobs), found.unrelated) == (1, (other.pid,))
            assert main(["attach", str(other.pid), str(job[0].pid), "--seconds", "0.1"]) in (0, 2)
            assert f"process {other.pid} is no rank" in capsys.readouterr().err
        finally:
            other.kill()


def test_the_command(
    job: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    capsys: Caught,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pids = [str(p.pid) for p in job]
    file = tmp_path / "seen.json"
    before = [Path(f"/proc/{p}/status").read_text().count("T (stopped)") for p in pids]
    assert main(["attach", *pids, "--seconds", "0.3", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    if "no permission" in err:
        pytest.skip("processes may not be read here")
    assert "2 of 2 ranks" in out and "wait_for_ever" in out and "# of no use" in out
    assert "no rank was seen to wait for another" in out
    assert [Path(f"/proc/{p}/status").read_text().count("T (stopped)") for p in pids] == before
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == out
    assert main(["report", str(file), "--format", "json"]) == 2
    assert "text only" in capsys.readouterr().err


def test_bad_input(capsys: Caught) -> None:
    for pid in ("4194304", "-5", "0", "99999999999999999999"):
        assert f"there is no process {pid}" in refused(capsys, "attach", pid)
    assert "--seconds" in refused(capsys, "attach", os.getpid(), "--seconds", "0")


@pytest.mark.parametrize(("program", "said"), [
    pytest.param("exit 1", "py-spy ended with status 1", id="fails"),
    pytest.param("echo garbage", "py-spy printed something else than stacks", id="prints-garbage"),
    pytest.param("exec sleep 60", "py-spy did not answer within 0.5 s", id="hangs"),
    pytest.param("", "py-spy cannot be started (Permission denied)", id="may-not-be-run"),
    pytest.param("echo 'Permission Denied: try again as root' >&2; exit 1", "SYS_PTRACE",
                 id="may-not-read"),
])  # fmt: skip
def test_a_py_spy_that_does_not_work(
    job: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    capsys: Caught,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    said: str,
) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755 if program else 0o644)
    monkeypatch.setattr(stacks, "program", lambda: str(tool))
    monkeypatch.setattr(stacks, "LIMIT_S", 0.5 if "sleep" in program else 20.0)
    monkeypatch.setattr(stacks, "_may_read", lambda pid: True)
    assert said in refused(capsys, "attach", job[0].pid, "--seconds", "0.1")


def test_processes_whose_memory_may_not_be_read(
    job: list[subprocess.Popen[bytes]], capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What py-spy says then differs: that it gets no name of an executable, for one."""
    monkeypatch.setattr(stacks, "program", lambda: "/bin/false")
    monkeypatch.setattr(stacks, "_may_read", lambda pid: False)
    assert "SYS_PTRACE" in refused(capsys, "attach", job[0].pid, "--seconds", "0.1")


def test_a_process_whose_environment_may_not_be_read(
    job: list[subprocess.Popen[bytes]], capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "environ", denied)
    line = refused(capsys, "attach", job[0].pid)
    assert f"process {job[0].pid}" in line and "SYS_PTRACE" in line
    assert "SYS_PTRACE" in refused(capsys, "attach")


@pytest.mark.parametrize(("address", "launched"), [
    ("127.0.0.1", 3), ("localhost", 3), ("::1", 3), ("10.0.0.7", 2),
])  # fmt: skip
def test_all_ranks_that_meet_at_this_machine_belong_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, launched: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    script = tmp_path / "train.py"
    script.write_text(CODE)
    given = {"WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": str(os.getpid())}
    with ranks([str(script)], 2, **given) as started:
        (found,) = jobs.find([started[0].pid]).jobs
        assert (found.world_size, found.launched) == (3, launched)


def test_workers_that_outlived_their_rank_are_no_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CODE)
    given = {"MASTER_ADDR": "orphans", "MASTER_PORT": str(os.getpid())}
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, {str(script)!r}])"
    with ranks([str(script)], 2, **given) as started:
        left = {**os.environ, **given, "RANK": "1", "WORLD_SIZE": "2"}
        parent = subprocess.Popen([sys.executable, "-c", start], env=left, start_new_session=True)
        try:
            parent.wait(20)
            (found,) = jobs.find([started[0].pid]).jobs
            assert [p.pid for p in found.ranks] == [p.pid for p in started]
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


THREADS = """\
import threading, time
lock, other = threading.Lock(), threading.Lock()
def saver():
    with other:
        started.wait()
        with lock:
            pass
started = threading.Event()
def save():
    with lock:
        started.set()
        print("there", flush=True)
        with other:
            pass
thread = threading.Thread(target=saver, name="saver")
thread.start()
time.sleep(0.3)
save()
"""


def test_threads_with_lines_of_the_program_and_what_they_hold(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(THREADS)
    with ranks([str(script)], 1, MASTER_ADDR="elsewhere", MASTER_PORT=str(os.getpid())) as started:
        (found,) = jobs.find([started[0].pid]).jobs
        try:
            seen = stacks.look(found, 0.2)
        except stacks.NotReadable as error:
            pytest.skip(str(error))
    assert seen is not None
    (rank,) = seen.ranks
    (thread,) = rank.threads
    assert (rank.holds, thread.name, thread.holds) == (("lock",), "saver", ("other",))
    (finding,) = judge(replace(seen, ranks=(rank, waits(1)), world_size=2, launched=2))
    assert (finding.rule, finding.ranks) == ("lock", (0,))
    assert [r.location.line for r in finding.related] == [6, 30]
    assert "neither can go on" in finding.cause


def waits(number: int) -> RankLook:
    frames = (Frame("all_reduce", "/x/site-packages/torch/distributed/c10d.py", 9),
              Frame("main", "/home/user/train.py", 30, "dist.all_reduce(loss)"))  # fmt: skip
    return RankLook(rank=number, pid=9, looks=(Look(frames), Look(frames)))


def test_it_looks_about_once_a_second(job: list[subprocess.Popen[bytes]]) -> None:
    (found,) = jobs.find([job[0].pid]).jobs
    try:
        seen = stacks.look(found, 2.0)
    except stacks.NotReadable as error:
        pytest.skip(str(error))
    assert seen is not None and seen.looks == 3 and 2.0 <= seen.apart_s < 10.0
    assert [len(rank.looks) for rank in seen.ranks] == [2, 2]


def test_a_job_that_ends_meanwhile(job: list[subprocess.Popen[bytes]], capsys: Caught) -> None:
    (found,) = [j for j in jobs.find().jobs if j.address == f"nowhere:{os.getpid()}"]
    for process in job:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    time.sleep(0.1)
    assert stacks.look(found, 0.1) is None


SPAWNED = """\
import multiprocessing, sys, time
def worker():
    time.sleep(1000)
def rank(number, there):
    child = multiprocessing.Process(target=worker)
    child.start()
    there.put(child.pid)
    time.sleep(1000)
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    there = multiprocessing.Queue()
    ranks = [multiprocessing.Process(target=rank, args=(n, there)) for n in (0, 1)]
    for process in ranks:
        process.start()
    print(*(p.pid for p in ranks), there.get() and there.get(), flush=True)
    time.sleep(1000)
"""


def test_spawned_ranks_are_found_without_the_workers_of_their_loaders(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            first, second, worker = map(int, process.stdout.readline().split())
            for asked in (process.pid, first, second):
                (found,) = jobs.find([asked]).jobs
                assert [(p.rank, p.pid) for p in found.ranks] == [(0, first), (1, second)]
            assert worker not in {p.pid for p in found.ranks}
        finally:
            os.killpg(process.pid, signal.SIGKILL)
