"""Finds the ranks of distributed jobs among the processes of this machine, by their environment."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_SPAWNED = ("multiprocessing.spawn", "--multiprocessing-fork", "spawn_main")


@dataclass(frozen=True)
class Process:
    """A process that is a rank; `started` is the position among its siblings where its environment
    does not tell the rank."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    command: str


@dataclass(frozen=True)
class Job:
    """The ranks of one job on this machine, by rank."""

    address: str
    world_size: int
    launched: int
    command: str
    ranks: tuple[Process, ...]


@dataclass(frozen=True)
class Found:
    """Jobs, and which of the processes that were asked for have nothing to do with one."""

    jobs: tuple[Job, ...]
    unrelated: tuple[int, ...] = ()


def find(pids: Iterable[int] = ()) -> Found:
    """The jobs of this user, or those that the given processes belong to: launchers, ranks, or what
    ranks have started. A job is found whole, as far as it is on this machine.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: the environment of a process that was asked for may not be read.
    """
    asked = list(dict.fromkeys(pids))
    families = {pid: _family(pid) for pid in asked}
    denied: set[int] = set()
    related = {*asked, *(pid for above, below in families.values() for pid in (*above, *below))}
    looked_at = [p for p in psutil.process_iter() if p.pid in related or _is_ours(p)]
    ranks = [rank for p in looked_at if (rank := _rank(p, denied)) is not None]
    jobs = _jobs(_without_children(ranks))
    if not asked:
        if not jobs and denied:
            raise PermissionError(f"process {min(denied)}")
        return Found(tuple(jobs))
    of_ranks = {p.pid: job for job in jobs for p in job.ranks}
    wanted: dict[str, Job] = {}
    unrelated = []
    for pid, (above, below) in families.items():
        mine = [of_ranks[p] for p in (pid, *below) if p in of_ranks]
        mine = mine or [of_ranks[p] for p in above if p in of_ranks][:1]  # a worker of a rank
        mine = mine or _jobs(_spawned([pid]))
        if not mine and denied & {pid, *below}:
            raise PermissionError(f"process {min(denied & {pid, *below})}")
        wanted |= {job.address: job for job in mine}
        if not mine:
            unrelated.append(pid)
    return Found(tuple(wanted[address] for address in sorted(wanted)), tuple(unrelated))


def _family(pid: int) -> tuple[list[int], list[int]]:
    """The processes above a process, nearest first, and those below it."""
    try:
        if not 0 < pid < 1 << 31:
            raise psutil.NoSuchProcess(pid)
        process = psutil.Process(pid)
        above = [p.pid for p in process.parents()]
        return above, [c.pid for c in process.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"there is no process {pid}") from None


def _is_ours(process: psutil.Process) -> bool:
    try:
        return os.getuid() in (0, process.uids().real)
    except psutil.Error:
        return False


def _rank(process: psutil.Process, denied: set[int]) -> Process | None:
    """A process with the variables of a rank; None for any other. Those that run
    Python and may not be read are put into `denied`."""
    words: list[str] = []
    try:
        words = process.cmdline()
        environment = process.environ()
    except (psutil.AccessDenied, PermissionError):
        if words and "python" in os.path.basename(words[0]):
            denied.add(process.pid)
        return None
    except (psutil.Error, OSError):
        return None
    if "RANK" not in environment or "WORLD_SIZE" not in environment or not words:
        environment = _of_slurm(environment)
    if "python" not in os.path.basename(words[0] if words else "") or not environment:
        return None
    address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    if run := environment.get("TORCHELASTIC_RUN_ID", ""):
        address = f"{address} {run}"
    return Process(
        pid=process.pid,
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, "LOCAL_RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE"),
        address=address,
        command=shlex.join(words[:8]),
    )


def _of_slurm(environment: dict[str, str]) -> dict[str, str]:
    """The variables of a rank as `srun` sets them; empty where it did not start the process."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return {}
    job = f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}"
    return {
        **environment,
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment.get("SLURM_NTASKS", "0"),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "-1"),
        "TORCHELASTIC_RUN_ID": f"slurm {job}",
    }


def _number(environment: dict[str, str], name: str) -> int:
    try:
        return int(environment.get(name, ""))
    except ValueError:
        return -1


def _without_children(found: list[Process]) -> list[Process]:
    """Without the workers of a rank, which inherit its environment."""
    ranks = {p.pid: p for p in found}
    kept = []
    for process in found:
        try:
            above = [p.pid for p in psutil.Process(process.pid).parents()]
        except psutil.Error:
            continue
        same = (process.rank, process.address)
        if not any(p in ranks and (ranks[p].rank, ranks[p].address) == same for p in above):
            kept.append(process)
    return kept


def _spawned(pids: list[int]) -> list[Process]:
    """The processes that a program started by `torch.multiprocessing.spawn`, given the program or
    one of them: ranks by their order, as their environment says nothing."""
    found: dict[int, Process] = {}
    open_: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            above = process.parent() if _is_spawned(process) else None
            open_.append(above or process)
    while open_:
        process = open_.pop(0)
        try:
            children = process.children()
            started = sorted(filter(_is_spawned, children), key=lambda c: c.create_time())
            command = shlex.join(process.cmdline()[:8])
        except psutil.Error:
            continue
        name = f"process {process.pid}"
        for n, child in enumerate(started):
            found[child.pid] = Process(
                child.pid, n, n, len(started), len(started), name, command
            )  # what it has spawned itself are the workers of its loaders
        open_ += [c for c in children if c not in started]
    return list(found.values())


def _is_spawned(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(word in words for word in _SPAWNED) and "resource_tracker" not in words


def _jobs(found: list[Process]) -> list[Job]:
    by_address: dict[str, list[Process]] = {}
    for process in found:
        by_address.setdefault(process.address, []).append(process)
    jobs = []
    for address, found_there in by_address.items():
        ranks = _one_each(found_there)
        ranks.sort(key=lambda p: (p.rank, p.pid))
        world = max(p.world_size for p in ranks)
        local = max(p.local_world_size for p in ranks)
        if local < 0 and _is_loopback(address):
            local = world  # no other machine can reach that address
        launched = max(local, len(ranks))
        jobs.append(Job(address, max(world, 0), launched, ranks[0].command, tuple(ranks)))
    return sorted(jobs, key=lambda job: job.address)


def _one_each(found: list[Process]) -> list[Process]:
    """One process for each rank: workers of loaders outlive a rank that was killed, and have its
    environment; they have lost the parent that the ranks of the job have in common."""
    if len({p.rank for p in found}) == len(found):
        return found
    parents = {p.pid: _parent(p.pid) for p in found}
    common = Counter(parent for parent in parents.values() if parent > 1)
    chosen: dict[int, Process] = {}
    for process in sorted(found, key=lambda p: (common[parents[p.pid]], p.pid)):
        chosen[process.rank] = process
    return list(chosen.values())


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _is_loopback(address: str) -> bool:
    host = address.partition(" ")[0].rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
