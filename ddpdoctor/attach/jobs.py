"""Finds the ranks of distributed jobs among the processes of this machine, by their environment."""

from __future__ import annotations

import contextlib
import os
import shlex
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


def find(pids: Iterable[int] = ()) -> list[Job]:
    """The jobs of this user, or those of the given processes: launchers, or ranks.

    Raises:
        ProcessLookupError: there is no such process.
    """
    asked = list(pids)
    within: set[int] | None = None
    if asked:
        within = set()
        for pid in asked:
            try:
                process = psutil.Process(pid)
                within |= {pid, *(c.pid for c in process.children(recursive=True))}
            except psutil.NoSuchProcess:
                raise ProcessLookupError(f"there is no process {pid}") from None
    found = [p for p in map(_rank, psutil.process_iter()) if p and (not asked or p.pid in within)]  # type: ignore[operator]
    found = _without_children(found)
    if asked and not found:
        found = _spawned(asked)
    return _jobs(found)


def _rank(process: psutil.Process) -> Process | None:
    """A process of this user with the variables of a rank; None for any other."""
    try:
        if process.uids().real != os.getuid() and os.getuid() != 0:
            return None
        environment = process.environ()
        words = process.cmdline()
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
    for address, ranks in by_address.items():
        ranks.sort(key=lambda p: (p.rank, p.pid))
        world = max(p.world_size for p in ranks)
        launched = max(max(p.local_world_size for p in ranks), len(ranks))
        jobs.append(Job(address, max(world, 0), launched, ranks[0].command, tuple(ranks)))
    return sorted(jobs, key=lambda job: job.address)
