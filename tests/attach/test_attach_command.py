"""`ddpdoctor attach` on real processes: ranks found by their environment, stacks from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Caught

from ddpdoctor.attach import jobs, stacks
from ddpdoctor.cli import main

CODE = """\
import sys, time
def wait_for_ever():
    time.sleep(1000)  # of no use
print("there", flush=True)
wait_for_ever()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes with the environment of ranks; the second one has a child with the same."""
    script = tmp_path / "train.py"
    script.write_text(CODE)
    child = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}])"
    started = []
    for number in (0, 1):
        given = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}  # fmt: skip
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
    (found,) = [j for j in jobs.find() if j.address == "nowhere:1"]
    assert [(p.rank, p.pid) for p in found.ranks] == [(n, p.pid) for n, p in enumerate(job)]
    assert (found.world_size, found.launched) == (2, 2)
    (alone,) = jobs.find([job[0].pid])
    assert [p.rank for p in alone.ranks] == [0]


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


def test_bad_input(
    job: list[subprocess.Popen[bytes]], capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["attach", "4194304"]) == 2
    assert "there is no process 4194304" in capsys.readouterr().err
    assert main(["attach", str(os.getpid()), "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err
    monkeypatch.setattr(stacks, "program", lambda: "/bin/false")
    assert main(["attach", str(job[0].pid), "--seconds", "0.1"]) == 0
    assert "py-spy ended with status 1" in capsys.readouterr().out
    denied = "import sys; sys.exit('Permission Denied: try again as root')"
    tool = Path(job[0].args[1]).with_name("denied")  # type: ignore[index]
    tool.write_text(f"#!{sys.executable}\n{denied}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "program", lambda: str(tool))
    assert main(["attach", str(job[0].pid), "--seconds", "0.1"]) == 2
    assert "SYS_PTRACE" in capsys.readouterr().err


def test_a_job_that_ends_meanwhile(job: list[subprocess.Popen[bytes]], capsys: Caught) -> None:
    (found,) = [j for j in jobs.find() if j.address == "nowhere:1"]
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
                (found,) = jobs.find([asked])
                assert [(p.rank, p.pid) for p in found.ranks] == [(0, first), (1, second)]
            assert worker not in {p.pid for p in found.ranks}
        finally:
            os.killpg(process.pid, signal.SIGKILL)
