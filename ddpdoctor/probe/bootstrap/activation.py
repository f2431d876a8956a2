"""When a process becomes a rank: opens its record and has torch wrapped.

A launcher's environment, `init_process_group`, or the first optimizer step can make it one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...events import SCHEMA, RankStarted, TorchLoaded
from ...storage.run_folder import EventWriter, rank_stem
from ..recording import patching, startup_cost
from ..recording.environment import (
    environment_at_start,
    note_environment,
    number_in_environment,
    visible_arguments,
)
from ..recording.import_hooks import Finder, wait_for
from ..recording.recorder import Recorder, current_recorder, guarded, set_recorder
from ..watchers.process import exits, spawned_processes
from . import install
from .install import Missing

Place = tuple[Path, dict[str, Any]]
"""The run folder, and the options of the probe."""

Opener = Callable[[int, int], "Place | None"]
"""Called with (rank, world size), -1 if unknown; returns where to record, None for nowhere."""


class _State:
    patched = late = False
    opener: Opener | None = None
    missing: list[Missing] = []
    becoming = threading.RLock()
    """Locked while this process becomes a rank: with threads as ranks several arrive at once."""


_state = _State()


def _forked() -> None:
    # A thread of the parent may have owned the lock at the fork: in the child nobody releases it.
    _state.becoming = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def rank_started() -> None:
    """Start recording in a process that a launcher started as a rank (RANK is set)."""
    _become(number_in_environment("RANK"), number_in_environment("WORLD_SIZE"))


def torch_loaded() -> None:
    """Wrap torch, once; call it as soon as torch has been imported."""
    if _state.patched:
        return
    _state.patched = True
    try:
        with startup_cost.counted():
            _state.missing = install.install(ensure_rank)
    except Exception as error:
        if recorder := current_recorder():
            recorder.trouble("hooks", error, "training: torch is not watched")
        raise
    guarded("hooks", _emit_missing)
    guarded("torch-loaded", _emit_torch)


def wait_for_torch() -> Finder:
    """Wrap torch when the program imports it; returns the import finder that waits for it."""
    return wait_for("torch", lambda _: torch_loaded(), lambda _: torch_found())


def torch_found() -> None:
    """Wrap torch after the program has begun to use it.

    Other modules may hold copies of its functions; process groups and models may exist.
    """
    if _state.patched:
        return
    dist: Any = sys.modules.get("torch.distributed")
    _state.late = dist is not None and dist.is_available() and dist.is_initialized()
    torch_loaded()
    patching.replace_copies()
    if _state.late:
        ensure_rank(dist.get_rank(), dist.get_world_size(), None)
        _adopt()


def watch_here(opener: Opener) -> None:
    """Watch this process from now on, without `ddpdoctor run` around it.

    Args:
        opener: asked where to record once this process is known to be a rank.
    """
    _state.opener = opener
    if not _state.patched:
        torch_loaded()
        patching.replace_copies()  # torch is imported already: `from torch import x` made copies


def become_rank(rank: int, world_size: int) -> None:
    """Start recording unless this process does already; groups and models may exist."""
    if current_recorder() is not None:
        return
    ensure_rank(rank, world_size, None)
    _adopt()


def _adopt() -> None:
    """Record the process groups and models made before torch was wrapped."""
    from ..collectives.process_groups import ProcessGroups
    from ..training.forwards import Forwards

    guarded("groups", ProcessGroups.current.adopt, lost=ProcessGroups.lost)
    guarded("forwards", Forwards.current.adopt, lost=Forwards.lost)


def become_rank_by_training() -> None:
    """Start recording as the only rank if an optimizer steps before a process group exists."""
    from ..training.optimizers import Optimizers

    Optimizers.current.at_first_step(lambda: become_rank(0, 1))


def leave(error: BaseException | None, trace: TracebackType | None) -> None:
    """Record that this rank is done, or the error that ended it, and stop recording."""
    if isinstance(error, SystemExit):
        exits.note_exit(error, trace)
    elif error is not None:
        exits.note_exception(error, trace)
    exits.leave()
    uninstall()


def uninstall() -> None:
    """Restore torch and stop recording."""
    patching.restore()
    _state.patched, _state.opener = False, None
    exits.uninstall()
    set_recorder(None)


def ensure_rank(rank: int, world_size: int, init_method: str | None) -> None:
    """Start recording in a process that calls `init_process_group`: that makes it a rank.

    Args:
        rank, world_size: -1 if not passed; then taken from the query of `init_method`
            (`tcp://host:port?rank=0&world_size=2`), or from the environment.
    """
    if current_recorder() is not None:
        return
    query = parse_qs(urlsplit(init_method or "").query)
    for value, name in ((rank, "rank"), (world_size, "world_size")):
        if value < 0 and query.get(name, [""])[0].isdigit():
            if name == "rank":
                rank = int(query[name][0])
            else:
                world_size = int(query[name][0])
    with _state.becoming:
        if current_recorder() is None:
            _become(
                rank if rank >= 0 else number_in_environment("RANK"),
                world_size if world_size >= 0 else number_in_environment("WORLD_SIZE"),
            )
            guarded("torch-loaded", _emit_torch)


def _place(rank: int, world_size: int) -> Place | None:
    if directory := os.environ.get("DDPDOCTOR_DIR"):
        os.environ["DDPDOCTOR_OWNER"] = str(os.getpid())
        return Path(directory), _options()
    return _state.opener(rank, world_size) if _state.opener else None


def _become(rank: int, world_size: int) -> None:
    place = _place(rank, world_size)
    if place is None:
        return
    with startup_cost.counted():
        _begin_record(rank, world_size, place)
    guarded("process", exits.install, lost="exceptions and exits of this rank")
    guarded("hooks", _emit_missing)
    guarded("start", lambda recorder: recorder.emit_cost(anyway=True))


def _begin_record(rank: int, world_size: int, place: Place) -> None:
    note_environment()
    directory, options = place
    attempt = number_in_environment("TORCHELASTIC_RESTART_COUNT", 0)
    if attempt:
        directory = directory / f"restart-{attempt}"
        directory.mkdir(mode=0o700, exist_ok=True)
    stem = rank_stem(max(rank, 0), world_size)
    try:
        writer = EventWriter(directory / f"{stem}.jsonl", directory / f"{stem}.log")
    except FileExistsError:  # another process claims this rank: keep the records of both
        stem = f"{stem}.pid-{os.getpid()}"
        writer = EventWriter(directory / f"{stem}.jsonl", directory / f"{stem}.log")
    new = Recorder(writer, directory, stem, options)
    set_recorder(new)
    new.emit(
        RankStarted(
            at=time.monotonic(),
            schema=SCHEMA,
            wall=time.time(),
            rank=rank,
            local_rank=number_in_environment("LOCAL_RANK"),
            world_size=world_size,
            pid=os.getpid(),
            node=platform.node(),
            attempt=attempt,
            argv=visible_arguments(sys.argv),
            cwd=_cwd(),
            python=platform.python_version(),
            script_digest=_script_digest(),
            environment=environment_at_start(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            spawned=spawned_processes.spawned_with(),
        ),
        vital=True,
    )


def _emit_missing(recorder: Recorder) -> None:
    """Record the parts that failed to install: that may have been before there was a recorder."""
    for part, error, lost in _state.missing:
        recorder.trouble(part, error, lost)


def _emit_torch(recorder: Recorder) -> None:
    import torch

    nccl = ""
    if torch.version.cuda or torch.version.hip:
        try:
            nccl = ".".join(str(v) for v in torch.cuda.nccl.version())
        except Exception:
            nccl = "unknown"
    recorder.emit(
        TorchLoaded(
            at=time.monotonic(),
            torch=str(torch.__version__),
            cuda=torch.version.cuda or (f"HIP {hip}" if (hip := torch.version.hip) else ""),
            nccl=nccl,
            threads=torch.get_num_threads(),
            interop_threads=torch.get_num_interop_threads(),
            late=_state.late,
        )
    )


def _options() -> dict[str, Any]:
    try:
        found = json.loads(os.environ.get("DDPDOCTOR_PROBE") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed
        return ""


def _script_digest() -> str:
    try:
        content = Path(sys.argv[0]).read_bytes() if sys.argv and sys.argv[0] else b""
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:16] if content else ""
