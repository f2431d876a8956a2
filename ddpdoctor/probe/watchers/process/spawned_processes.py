"""Processes that `torch.multiprocessing.spawn` makes: how many, and what they raise."""

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
from ...recording.frames import passed_over, unframe
from ...recording.patching import replace
from ...recording.recorder import complain, current_recorder
from . import exits


def watch_spawned(module: Any) -> None:
    """See the exceptions of ranks made by `torch.multiprocessing.spawn`, which catches them, and
    how these end, which only the process that made them can tell."""
    original = module._wrap

    def _wrap(fn: Any, i: int, args: Any, error_file: str) -> Any:
        return original(_Noted(fn), i, args, error_file)

    replace(module, "_wrap", passed_over(_wrap, original))
    _count_spawned(module)
    _see_ends(module)


_SPAWNED = "DDPDOCTOR_SPAWNED"


def _count_spawned(module: Any) -> None:
    """Let spawned processes know how many they are (see `spawned_with`)."""
    import torch.multiprocessing

    start = module.start_processes

    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **more: Any) -> Any:
        os.environ[_SPAWNED] = f"{nprocs}:{os.getpid()}"
        try:
            return start(fn, args, nprocs, *rest, **more)
        except BaseException as error:
            unframe(error)
            raise

    passed_over(start_processes, start)
    for owner in (module, torch.multiprocessing):
        if getattr(owner, "start_processes", None) is start:
            replace(owner, "start_processes", start_processes)


def _see_ends(module: Any) -> None:
    """Note which of the spawned processes ended first, where none was left to say so."""
    context, exited = module.ProcessContext, module.ProcessExitedException
    original = context.join

    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except exited as error:
            _emit_end(self.processes, error)
            unframe(error)
            raise

    replace(context, "join", passed_over(join, original))


def spawned_with() -> int:
    """How many processes were spawned together with this one; 0 where it was not spawned."""
    count, _, parent = os.environ.get(_SPAWNED, "").partition(":")
    return int(count) if count.isdecimal() and parent == str(os.getppid()) else 0


class _Noted:
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
    """What a process raised that is no rank goes to the record of the node, where that is known."""
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
        complain(trouble)


def _emit_end(processes: Iterable[Any], error: Any) -> None:
    """Which of these ended first, as torch's error says; all are gone by now."""
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
        complain(trouble)


def _write(event: Event) -> None:
    """To the record of the node, where that is known."""
    directory, owner = (os.environ.get(f"DDPDOCTOR_{name}") for name in ("DIR", "OWNER"))
    nodes = RunFolder(directory).node_files() if directory else []
    if len(nodes) != 1 or owner is not None:  # a helper of a rank, which hears of it itself
        return
    writer = EventWriter(nodes[0][1], shared=True)
    writer.write(event, vital=True)
    writer.close()


def _frames(trace: TracebackType | None) -> Iterator[StackFrame]:
    """The user's lines, outermost first."""
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        if classify(code.co_filename) == USER:
            file = os.path.abspath(code.co_filename)
            text = linecache.getline(file, line).rstrip()
            yield StackFrame(file=file, line=line, function=code.co_name, user=True, text=text)
