"""Dumps of stacks (`rank-R.stacks.txt`), as faulthandler writes them, to frames."""

from __future__ import annotations

import linecache
import re
import signal
from pathlib import Path

from ..events import StackFrame
from ..events.stall import DEEPEST

_THREAD = re.compile(
    r"(?:Stack|(?:Current thread|Thread) 0x[0-9a-f]+.*) \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_NOT_USERS = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<")
_OURS = re.compile(r"/ddpdoctor/(?:probe|shim)/")
_FATAL = "Fatal Python error: "
_BEGINS = ("_worker_loop", "_bootstrap")
"""Functions of torch and of multiprocessing in which a worker's own stack begins."""
_CRASHES = {
    f"{_FATAL}{text}\n": number
    for text, number in (
        ("Segmentation fault", signal.SIGSEGV),
        ("Aborted", signal.SIGABRT),
        ("Bus error", signal.SIGBUS),
        ("Illegal instruction", signal.SIGILL),
        ("Floating point exception", signal.SIGFPE),
        ("Floating-point exception", signal.SIGFPE),
    )
}


def threads(dump: str) -> list[tuple[StackFrame, ...]]:
    """The stacks in a text of one or more dumps, each innermost frame first."""
    return [frames for _, frames in _threads(dump)]


WORKER, RANK = "Worker {}:\n", "Rank again:\n"
"""Lines that the monitor writes around the stack of a worker in the file of its rank."""


def _threads(dump: str) -> list[tuple[bool, tuple[StackFrame, ...]]]:
    """As above, each with whether it is of the thread that wrote the dump."""
    found: list[tuple[bool, list[StackFrame]]] = []
    of_worker = False
    for line in dump.splitlines():
        if line.startswith("Worker ") or line == RANK.strip():
            of_worker = line.startswith("Worker ")
        elif of_worker:
            continue
        elif _THREAD.match(line):
            found.append((line.startswith("Current"), []))
        elif (match := _FRAME.match(line)) and found and len(found[-1][1]) < DEEPEST:
            if _OURS.search(match[1]):
                continue
            found[-1][1].append(_frame(match[1], int(match[2]), match[3]))
    return [(current, tuple(frames)) for current, frames in found]


def worker(dump: str) -> tuple[StackFrame, ...]:
    """The stack of a worker of a loader in a dump of its own: without the frames of the rank from
    which it was forked."""
    every = threads(dump)
    frames = every[-1] if every else ()
    begin = next((n for n, f in enumerate(frames) if f.function in _BEGINS), len(frames))
    return frames[:begin]


def main_thread(dump: str) -> tuple[StackFrame, ...]:
    """The main thread's stack in the last dump: it stands last."""
    every = threads(dump)
    return every[-1] if every else ()


def crash(dump: str) -> tuple[StackFrame, ...]:
    """The stack at a fatal error: of the thread that met it, or of the main thread where that one
    runs no code of the user's. Empty where there was no such error."""
    _, fatal, after = dump.rpartition(_FATAL)
    every = _threads(after) if fatal else []
    met = next((frames for current, frames in every if current and _users(frames)), None)
    return met or (every[-1][1] if every else ())


def of_native_thread(dump: str) -> bool:
    """Whether a thread that runs no Python met the fatal error: then none is the current one."""
    _, fatal, after = dump.rpartition(_FATAL)
    return bool(fatal) and not any(current for current, _ in _threads(after))


def _users(frames: tuple[StackFrame, ...]) -> bool:
    return any(frame.user for frame in frames)


def beside(records: Path | None) -> Path | None:
    """The file of stacks of the rank with that event file."""
    return records.with_suffix(".stacks.txt") if records else None


def read(path: Path | None, start: int = 0) -> str:
    """What stands there from that place on."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


def fatal_signal(dump: str) -> int | None:
    """The signal of a crash."""
    return next((number for text, number in _CRASHES.items() if text in dump), None)


def _frame(file: str, line: int, function: str) -> StackFrame:
    user = _NOT_USERS.search(file) is None
    text = linecache.getline(file, line).strip()[:300] if user else ""
    return StackFrame(file=file, line=line, function=function, user=user, text=text)
