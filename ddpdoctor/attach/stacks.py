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
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ..monitor import system
from .jobs import Job, Process
from .locks import held
from .own import is_own
from .records import Frame, JobLook, Look, RankLook, Thread, Worker

LIMIT_S = 20.0
"""No process may take longer to be read."""

EVERY_S = 1.0
"""Between two looks, about; there are two at least."""

MOST_WORKERS = 16
MOST_THREADS = 16
MOST_FRAMES = 100
"""Workers and threads of a rank, and frames of a stack, that are kept."""

AT_ONCE = 8

PERMISSION = (
    "no permission to read {whom}: run it as the same user with CAP_SYS_PTRACE "
    "(in a container: --cap-add SYS_PTRACE), or as root"
)


class NotReadable(Exception):
    """Stacks cannot be read here. One line that says what to do."""


class _Thread(msgspec.Struct):
    """A thread in the JSON of `py-spy dump`."""

    thread_name: str | None = None
    os_thread_id: int | None = None
    thread_id: int | None = None
    frames: list[dict[str, object]] = []

    @property
    def key(self) -> int:
        return self.os_thread_id or self.thread_id or 0


@dataclass(frozen=True)
class _Dump:
    """The stacks of a process: of its main thread, and by thread of the others that have lines of
    the program; or why there are none."""

    frames: tuple[Frame, ...] = ()
    others: tuple[tuple[int, str, tuple[Frame, ...]], ...] = ()
    trouble: str = ""


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
    """Look at all ranks of a job, about once a second and at least twice; None where it has ended
    meanwhile.

    Raises:
        NotReadable: no stack of any rank may be read.
    """
    spy = program()
    pids = [p.pid for p in job.ranks]
    workers = {pid: _children(pid) for pid in pids}
    everybody = [*pids, *(w for those in workers.values() for w in those)]
    begin = time.monotonic()
    cpu = {pid: system.cpu_seconds(pid) for pid in everybody}
    before = {(pid, pid): _counters(pid, pid) for pid in pids}
    dumps = [_dump_all(spy, pids)]
    if not any(map(psutil.pid_exists, pids)):
        return None
    _demand_one(spy, dumps[0])
    before |= {(pid, key): _counters(pid, key) for pid in pids for key, *_ in dumps[0][pid].others}
    of_workers = _dump_all(spy, everybody[len(pids) :])
    pause = apart_s / max(1, round(apart_s / EVERY_S))
    while len(dumps) < 2 or time.monotonic() - begin < apart_s - 0.01:
        time.sleep(max(0.0, begin + pause * len(dumps) - time.monotonic()))
        dumps.append(_dump_all(spy, pids))
    spent = time.monotonic() - begin
    after = {both: _counters(*both) for both in before}
    rates = {
        both: tuple(max(0.0, (b - a) / spent) for a, b in zip(before[both], after[both]))  # noqa: B905
        for both in before
    }
    used = {p: max(0.0, (system.cpu_seconds(p) - cpu[p]) / spent) for p in everybody}
    if not any(map(psutil.pid_exists, pids)):
        return None
    gpus = _gpu_loads(pids)
    ranks = tuple(
        _rank(
            p,
            [d[p.pid] for d in dumps],
            {key: rate for (pid, key), rate in rates.items() if pid == p.pid},
            cpu=round(used[p.pid], 3),
            gpu=gpus.get(p.pid),
            workers=tuple(
                Worker(w, _state(w), round(used[w], 3), of_workers[w].frames)
                for w in workers[p.pid]
            ),
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
        looks=len(dumps),
    )


def _demand_one(spy: str, seen: dict[int, _Dump]) -> None:
    """Refuse to go on where no rank that runs could be read."""
    alive = {pid: dump for pid, dump in seen.items() if system.alive(pid)}
    troubles = [dump.trouble for dump in alive.values() if dump.trouble]
    if not alive or len(troubles) < len(alive):
        return
    said = [t for t in troubles if not t.startswith("py-spy ")]  # by py-spy itself
    if any("permi" in t.lower() for t in said) or not any(map(_may_read, alive)):
        raise NotReadable(PERMISSION.format(whom="other processes"))
    raise NotReadable(f"{spy} can read none of these processes: {troubles[0]}")


def _may_read(pid: int) -> bool:
    """Whether the memory of a process may be read: what py-spy needs."""
    try:
        with open(f"/proc/{pid}/mem", "rb"):
            return True
    except OSError:
        return False


def _counters(pid: int, thread: int) -> tuple[float, float]:
    return system.wakings(pid, thread), system.wanted_seconds(pid, thread)


def _rank(
    process: Process,
    dumps: Sequence[_Dump],
    rates: dict[int, tuple[float, ...]],
    **more: object,
) -> RankLook:
    wakes, wanted = rates[process.pid]
    looks = _kept([d.frames for d in dumps])
    fields = {
        "looks": looks,
        "wakes": round(wakes, 3),
        "wanted": round(wanted, 3),
        "holds": held(f for f in looks[-1].frames if not is_own(f.file)) if looks else (),
        "threads": tuple(_threads(dumps, rates)),
        "trouble": dumps[-1].trouble,
        **more,
    }
    return RankLook(
        rank=process.rank,
        pid=process.pid,
        local_rank=process.local_rank,
        state=_state(process.pid),
        **fields,  # type: ignore[arg-type]
    )


def _threads(dumps: Sequence[_Dump], rates: dict[int, tuple[float, ...]]) -> list[Thread]:
    """The other threads that the last look has."""
    found = []
    for key, name, frames in dumps[-1].others[:MOST_THREADS]:
        earlier = [f for d in dumps[:-1] for k, _, f in d.others if k == key]
        wakes, wanted = rates.get(key, (0.0, 0.0))
        found.append(
            Thread(
                name=name,
                looks=_kept([*earlier, frames]),
                wakes=round(wakes, 3),
                wanted=round(wanted, 3),
                holds=held(f for f in frames if not is_own(f.file)),
            )
        )
    return found


def _kept(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Look, ...]:
    """The first stack, the first that differs from it, and the last."""
    known = [frames for frames in stacks if frames]
    if not known or not stacks[-1]:
        return ()
    between = next((frames for frames in known[1:-1] if frames != known[0]), None)
    return tuple(Look(f) for f in (known[0], between, known[-1]) if f is not None)[-len(known) :]


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


def _dump_all(spy: str, pids: Sequence[int]) -> dict[int, _Dump]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(pids, pool.map(lambda pid: _dump(spy, pid), pids), strict=True))


def _dump(spy: str, pid: int) -> _Dump:
    """What py-spy reads; asked once more where it failed, as a process that runs may change under
    its eyes."""
    seen = _asked(spy, pid)
    again = seen.trouble and "did not answer" not in seen.trouble and system.alive(pid)
    return _asked(spy, pid) if again else seen


def _asked(spy: str, pid: int) -> _Dump:
    words = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
        threads = msgspec.json.decode(done.stdout, type=list[_Thread]) if done.stdout else []
    except subprocess.TimeoutExpired:
        return _Dump(trouble=f"py-spy did not answer within {LIMIT_S:g} s")
    except msgspec.MsgspecError:
        return _Dump(trouble="py-spy printed something else than stacks; is it py-spy?")
    except OSError as error:
        return _Dump(trouble=f"py-spy cannot be started ({error.strerror})")
    if not threads:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return _Dump(trouble=said[0] if said else f"py-spy ended with status {done.returncode}")
    main = next((t for t in threads if t.os_thread_id == pid), None)
    main = main or next((t for t in threads if t.thread_name == "MainThread"), threads[-1])
    others = ((t, tuple(map(_frame, t.frames[:MOST_FRAMES]))) for t in threads if t is not main)
    return _Dump(
        tuple(map(_frame, main.frames[:MOST_FRAMES])),
        tuple(
            (t.key, t.thread_name or "", frames)
            for t, frames in others
            if not all(is_own(f.file) for f in frames)
        ),
    )


def _frame(told: dict[str, object]) -> Frame:
    file, line = str(told.get("filename") or ""), told.get("line")
    number = line if isinstance(line, int) else 0
    name = str(told.get("name") or "").rpartition(".")[2]
    return Frame(name, file, number, linecache.getline(file, number).strip()[:300])


def _gpu_loads(pids: Sequence[int]) -> dict[int, float]:
    gpus = system.Gpus()
    in_use = gpus.by_process()
    if not in_use:
        return {}
    _, busy = gpus.used()
    return {
        pid: max((float(busy[index]) for index in in_use[pid] if index < len(busy)), default=0.0)
        for pid in pids
        if pid in in_use
    }
