"""Reads the Python stacks of processes from outside, with py-spy, without stopping them."""

from __future__ import annotations

import linecache
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil

from ..monitor import system
from .jobs import Job
from .records import Frame, JobLook, Look, RankLook, Worker

LIMIT_S = 20.0
"""No process may take longer to be read."""

MOST_WORKERS = 16
AT_ONCE = 8


class NotReadable(Exception):
    """Stacks cannot be read here. One line that says what to do."""


class _Thread(msgspec.Struct):
    """A thread in the JSON of `py-spy dump`."""

    thread_name: str | None = None
    os_thread_id: int | None = None
    thread_id: int | None = None
    frames: list[dict[str, object]] = []


def program() -> str:
    """Where py-spy is.

    Raises:
        NotReadable: it is not installed.
    """
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if not found:
        raise NotReadable("py-spy is not installed; type: pip install 'ddpdoctor[attach]'")
    return found


def look(job: Job, apart_s: float) -> JobLook | None:
    """Look at all ranks of a job twice; None where it has ended meanwhile.

    Raises:
        NotReadable: no stack of any rank may be read.
    """
    spy = program()
    pids = [p.pid for p in job.ranks]
    workers = {pid: _children(pid) for pid in pids}
    everybody = [*pids, *(w for those in workers.values() for w in those)]
    begin = time.monotonic()
    cpu = {pid: system.cpu_seconds(pid) for pid in everybody}
    woken = {pid: (system.wakings(pid), system.wanted_seconds(pid)) for pid in pids}
    first = _dump_all(spy, everybody)
    time.sleep(max(0.0, apart_s - (time.monotonic() - begin)))
    second = _dump_all(spy, pids)
    spent = time.monotonic() - begin
    wakes = {p: max(0.0, (system.wakings(p) - woken[p][0]) / spent) for p in pids}
    wanted = {p: max(0.0, (system.wanted_seconds(p) - woken[p][1]) / spent) for p in pids}
    used = {p: max(0.0, (system.cpu_seconds(p) - cpu[p]) / spent) for p in everybody}
    if not any(map(psutil.pid_exists, pids)):
        return None
    troubles = [second[p][1] for p in pids if second[p][1]]
    if len(troubles) == len(pids) and any("permi" in t.lower() for t in troubles):
        raise NotReadable(
            "no permission to read other processes: run it as the same user with CAP_SYS_PTRACE "
            "(in a container: --cap-add SYS_PTRACE), or as root"
        )
    gpus = _gpu_loads(pids)
    ranks = tuple(
        RankLook(
            rank=p.rank,
            pid=p.pid,
            local_rank=p.local_rank,
            state=_state(p.pid),
            looks=tuple(Look(frames) for frames in (first[p.pid][0], second[p.pid][0]) if frames),
            cpu=round(used[p.pid], 3),
            wakes=round(wakes[p.pid], 1),
            wanted=round(wanted[p.pid], 3),
            gpu=gpus.get(p.pid),
            workers=tuple(
                Worker(w, _state(w), round(used[w], 3), first[w][0]) for w in workers[p.pid]
            ),
            trouble=second[p.pid][1],
        )
        for p in job.ranks
    )
    return JobLook(
        address=job.address,
        node=os.uname().nodename,
        world_size=job.world_size,
        launched=job.launched,
        command=job.command,
        at=time.time(),
        apart_s=round(spent, 2),
        ranks=ranks,
    )


def _children(pid: int) -> list[int]:
    """The Python children of a rank: workers of its loaders."""
    found = []
    for child in system.children(pid):
        try:
            words = psutil.Process(child).cmdline()
        except psutil.Error:
            continue
        if (
            words
            and "python" in os.path.basename(words[0])
            and "resource_tracker" not in str(words)
        ):
            found.append(child)
    return found[:MOST_WORKERS]


def _state(pid: int) -> str:
    seen = system.stat(pid)
    return seen.state if seen else ""


def _dump_all(spy: str, pids: Sequence[int]) -> dict[int, tuple[tuple[Frame, ...], str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(pids, pool.map(lambda pid: _dump(spy, pid), pids), strict=True))


def _dump(spy: str, pid: int) -> tuple[tuple[Frame, ...], str]:
    """The stack of the main thread, and why there is none."""
    words = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
        threads = msgspec.json.decode(done.stdout, type=list[_Thread]) if done.stdout else []
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        return (), f"{type(error).__name__}: {error}"
    if not threads:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return (), said[0] if said else f"py-spy ended with status {done.returncode}"
    main = next((t for t in threads if t.os_thread_id == pid), None)
    main = main or next((t for t in threads if t.thread_name == "MainThread"), threads[-1])
    return tuple(map(_frame, main.frames)), ""


def _frame(told: dict[str, object]) -> Frame:
    file, line = str(told.get("filename") or ""), told.get("line")
    number = line if isinstance(line, int) else 0
    name = str(told.get("name") or "").rpartition(".")[2]
    return Frame(name, file, number, linecache.getline(file, number).strip()[:300])


def _gpu_loads(pids: Sequence[int]) -> dict[int, float]:
    gpus = system.Gpus()
    held = gpus.by_process()
    if not held:
        return {}
    _, busy = gpus.used()
    return {
        pid: max((float(busy[index]) for index in held[pid] if index < len(busy)), default=0.0)
        for pid in pids
        if pid in held
    }
