"""How many processes does `torch.multiprocessing.spawn` start, what do they raise, how do they end?

Spawned functions are wrapped before they are pickled; the parent's `join` tells how they ended.
"""

from __future__ import annotations

import linecache
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from ....events import Event, SpawnEnded, SpawnFailed, StackFrame
from ....storage.run_folder import EventWriter, RunFolder
from ...recording.code_locations import USER, classify
from ...recording.frames import disguise, unframe
from ...recording.patching import replace
from ...recording.recorder import current_recorder, write_probe_error
from . import exits


def watch_spawned(module: Any) -> None:
    """Wrap `torch.multiprocessing.spawn`.

    It catches exceptions of the ranks it starts, so they are recorded before; only the parent
    process can tell how a rank ended.
    """
    original = module._wrap

    def _wrap(fn: Any, i: int, args: Any, error_file: str) -> Any:
        return original(_Recording(fn), i, args, error_file)

    replace(module, "_wrap", disguise(_wrap, original))
    _count_spawned(module)
    _watch_ends(module)


_SPAWNED = "DDPDOCTOR_SPAWNED"


def _count_spawned(module: Any) -> None:
    """Pass the number of spawned processes to them in the environment (see `spawned_with`)."""
    import torch.multiprocessing

    start = module.start_processes

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **more: Any) -> Any:
        os.environ[_SPAWNED] = f"{nprocs}:{os.getpid()}"
        try:
            return start(fn, args, nprocs, *rest, **more)
        except BaseException as error:
            unframe(error)
            raise

    disguise(start_processes, start)
    for owner in (module, torch.multiprocessing):
        if getattr(owner, "start_processes", None) is start:
            replace(owner, "start_processes", start_processes)


def _watch_ends(module: Any) -> None:
    """Record which spawned process ended first when it was killed and could not record that."""
    context, exited = module.ProcessContext, module.ProcessExitedException
    original = context.join

    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, exited):
                _emit_end(self.processes, error)
            unframe(error)
            raise

    replace(context, "join", disguise(join, original))


def spawned_with() -> int:
    """Number of processes spawned together with this one; 0 if it was not spawned."""
    count, _, parent = os.environ.get(_SPAWNED, "").partition(":")
    return int(count) if count.isdecimal() and parent == str(os.getppid()) else 0


class _Recording:
    """Calls a function and records the exception that leaves it."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        try:
            return self.fn(*args)
        except Exception as error:
            if current_recorder() is not None:
                exits.note_exception(error, error.__traceback__)
            else:
                _emit(args, error)
            unframe(error)
            raise


def _emit(args: tuple[Any, ...], error: BaseException) -> None:
    """Record an exception of a process that never became a rank, in the node's record."""
    try:
        _write(
            SpawnFailed(
                at=time.monotonic(),
                wall=time.time(),
                index=int(args[0]),
                count=spawned_with(),
                pid=os.getpid(),
                kind=exits.qualified(type(error)),
                message=exits.text_of(error)[: exits.MESSAGE_LIMIT],
                frames=tuple(_frames(error.__traceback__)),
            )
        )
    except Exception as trouble:
        write_probe_error(trouble)


def _emit_end(processes: Iterable[Any], error: Any) -> None:
    """Record the process that ended first, by torch's error; all processes are gone by now."""
    try:
        code, first = error.exit_code, error.error_pid
        emitted = (p.pid for p in processes if p.exitcode == -signal.SIGTERM and p.pid != first)
        _write(
            SpawnEnded(
                at=time.monotonic(),
                wall=time.time(),
                pid=first,
                status=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                told=tuple(emitted),
            )
        )
    except Exception as trouble:
        write_probe_error(trouble)


def _write(event: Event) -> None:
    """Write an event to the node's record, if this process is no rank's helper and there is one
    node only (else it is unknown which is this one's)."""
    directory, owner = (os.environ.get(f"DDPDOCTOR_{name}") for name in ("DIR", "OWNER"))
    nodes = RunFolder(directory).node_files() if directory else []
    if len(nodes) != 1 or owner is not None:  # a rank's helper: the rank sees its exception
        return
    writer = EventWriter(nodes[0][1], shared=True)
    writer.write(event, vital=True)
    writer.close()


def _frames(trace: TracebackType | None) -> Iterator[StackFrame]:
    """The user's frames of a traceback, outermost first."""
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        if classify(code.co_filename) == USER:
            file = os.path.abspath(code.co_filename)
            text = linecache.getline(file, line).rstrip()
            yield StackFrame(file=file, line=line, function=code.co_name, user=True, text=text)
