"""The run folder of a launch: all its ranks find the same one, without communication.

Each rank knows what identifies its launch: the launcher's process and its start time, or the
scheduler's number of the job step. The folder's name is derived from it, and `run.json` holds it: a
rank that finds another launch's `run.json` in a folder takes the next name.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from ..storage.run_folder import FolderError, Lines, RunFolder, RunInfo, plain_name, rank_stem

MOST_FOLDERS = 1000

_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_ATTEMPT = re.compile(r"/attempt_\d+/")


@dataclass(frozen=True)
class Launch:
    """The launch that this process is part of.

    Attributes:
        key: identifies the launch: equal on all its ranks (of this node, if nodes share nothing).
        name: the name of its folder; sorts by time where that is known.
        local_size: the number of ranks on this node, 0 where unknown.
        told: the number of ranks by the launcher's environment, -1 where it does not say.
        single: no other launch with several ranks can have the same key at the same time.
    """

    key: str
    name: str
    rank: int = -1
    world_size: int = -1
    local_rank: int = -1
    local_size: int = 0
    node_rank: int = 0
    attempt: int = 0
    more_attempts: bool = False
    told: int = -1
    single: bool = False


def this_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The launch of this process, from its environment and its parent process."""
    environ = _environment() if environ is None else environ
    origin, born = _origin(environ)
    script = PurePath(sys.argv[0]).stem if sys.argv and sys.argv[0] else "run"
    clock = time.strftime("%Y%m%d-%H%M%S", time.localtime(born)) if born else origin
    attempt = _number(environ, ("TORCHELASTIC_RESTART_COUNT",), 0)
    return Launch(
        key=hashlib.sha256(f"{os.getuid()}:{origin}:{born}".encode()).hexdigest()[:32],
        name=plain_name(f"{clock}-{script}"),
        rank=_number(environ, ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")),
        world_size=(size := _number(environ, _SIZES)),
        local_rank=_number(environ, ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")),
        local_size=_number(environ, ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), 0),
        node_rank=_number(environ, ("GROUP_RANK", "SLURM_NODEID"), 0),
        attempt=attempt,
        more_attempts=attempt < _number(environ, ("TORCHELASTIC_MAX_RESTARTS",), 0),
        told=size,
        single=not origin.startswith("pid-") or "MASTER_PORT" in environ,
    )


def open_folder(out: Path | None, launch: Launch, *, stem: str | None = None) -> RunFolder:
    """The folder of a launch, created by its first rank.

    Args:
        stem: the name of this rank's file, if it is known; a folder that holds it is another run's.

    Raises:
        FolderError: no folder can be written.
    """
    places = [out] if out is not None else [Path("ddpdoctor-runs") / launch.name, _spare(launch)]
    for place in places:
        with contextlib.suppress(OSError):
            return _joined(place, launch, stem)
    raise FolderError(f"cannot write to {places[-1]}; give another folder with out=")


def is_first_here(folder: RunFolder) -> bool:
    """Whether this process has to start the monitor of its node: true for the first caller only."""
    try:
        fd = os.open(_mark(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.close(fd)
    return True


def reported(folder: RunFolder) -> None:
    """Record that the monitor of this node has reported."""
    _mark(folder).unlink(missing_ok=True)


def is_reported(folder: RunFolder) -> bool:
    return not _mark(folder).exists()


def _mark(folder: RunFolder) -> Path:
    return folder.path / f".monitor-{plain_name(platform.node())}"


def _joined(place: Path, launch: Launch, stem: str | None) -> RunFolder:
    for number in range(1, MOST_FOLDERS):
        path = place if number == 1 else place.with_name(f"{place.name}-{number}")
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = RunFolder(path.resolve())
        if _claim(folder, launch):
            path.chmod(0o700)
            return folder
        there = folder.read_info()
        mine = folder.attempt_path(launch.attempt) / f"{stem}.jsonl" if stem else None
        if (
            there is not None
            and there.id == launch.key
            and there.ended_at is None
            and not (mine and mine.exists() and not _is_twin(launch, mine))
        ):
            return folder
    raise FolderError(f"too many runs in {place.parent}; give another folder with out=")


def _is_twin(launch: Launch, file: Path) -> bool:
    """Whether a rank's file is being written by another process of this launch with the same rank,
    rather than being left by an earlier launch."""
    if not launch.single or max(launch.told, launch.world_size) < 2:
        return False
    from ..events import RankStarted
    from ..run.liveness import there

    said = next(Lines(file).events(), None)
    if not isinstance(said, RankStarted):  # it is about to be written
        return True
    return there(said.node, said.pid, said.wall, file.stat().st_mtime)


def _claim(folder: RunFolder, launch: Launch) -> bool:
    """Write `run.json` if there is none; returns whether it did, true for exactly one rank."""
    if folder.info_path.exists():
        return False
    if any(folder.rank_files()):  # a run that lost its run.json, or one that is being written
        return False
    info = RunInfo(
        schema_version=1,
        id=launch.key,
        command=[PurePath(sys.executable or "python").name, *_arguments()],
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        tool_version=_version(),
        launcher="checkup",
    )
    fd, temporary = tempfile.mkstemp(dir=folder.path, prefix=".run-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(info)))
        os.link(temporary, folder.info_path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _origin(environ: Mapping[str, str]) -> tuple[str, float]:
    """What identifies the launch of this process, and when it began (0 where not known)."""
    parent = os.getppid()
    born = _born(parent)
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    run = environ.get("TORCHELASTIC_RUN_ID")
    address = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    if run and _number(environ, ("GROUP_WORLD_SIZE",)) > 1:  # what its nodes have in common
        return f"torchelastic-{run}-{address}", 0.0
    if _ATTEMPT.search(error_file):  # a folder that torchrun makes anew for every launch
        folder = _ATTEMPT.split(error_file)[0]
        return folder, _modified(f"{folder}/attempt_0") or born  # itself it changes in a restart
    if run:
        return f"torchelastic-{run}-{environ.get('MASTER_PORT', '')}-{parent}", born
    if _starts_ranks(environ):
        parent = os.getpid()
        born = _born(parent)
    by_parent = f"pid-{parent}-{address}"
    if multiprocessing.parent_process() is not None:  # `mp.spawn`, whoever started its parent
        return by_parent, born
    if (job := environ.get("SLURM_JOB_ID")) and (step := environ.get("SLURM_STEP_ID")):
        return f"slurm-{job}.{step}", 0.0
    if space := environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid"):
        return f"mpi-{space}", 0.0
    return by_parent, born


def _starts_ranks(environ: Mapping[str, str]) -> bool:
    """Whether this rank has started the others, as its children (Lightning does)."""
    port, mine = environ.get("MASTER_PORT"), environ.get("LOCAL_RANK", "0")
    if not port or multiprocessing.parent_process() is not None:
        return False
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = child.environ()
            if theirs.get("MASTER_PORT") == port and theirs.get("LOCAL_RANK", mine) != mine:
                return True
    return False


def _born(pid: int) -> float:
    import psutil

    try:
        return float(int(psutil.Process(pid).create_time()))
    except psutil.Error:
        return 0.0


def _modified(path: str) -> float:
    try:
        return float(int(os.stat(path).st_ctime))
    except OSError:
        return 0.0


def _spare(launch: Launch) -> Path:
    """A folder for runs whose current folder cannot be written."""
    return Path(tempfile.gettempdir()) / f"ddpdoctor-runs-{os.getuid()}" / launch.name


def _arguments() -> tuple[str, ...]:
    from ..probe.recording.environment import visible_arguments

    return visible_arguments(sys.argv)


def _environment() -> dict[str, str]:
    from ..probe.recording.environment import launchers_environment

    return launchers_environment()


def _version() -> str:
    from .._version import __version__

    return __version__


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int = -1) -> int:
    for name in names:
        if (text := environ.get(name, "")).isdecimal():
            return int(text)
    return default


def stem_of(launch: Launch) -> str | None:
    """The name of this rank's file without suffix, None where the rank is not known yet."""
    return rank_stem(launch.rank, launch.world_size) if launch.rank >= 0 else None
