"""The file that stacks go to, when the monitor asks, on SIGTERM and in a crash.

A thread that answers the monitor (see `answers`) writes those of all threads, since while it runs
none of them does. Where it does not get to that, the monitor sends a signal, and faulthandler
writes that of the main thread alone: reading the stack of a thread that runs may crash the process.

faulthandler knows the number of a descriptor and writes to whatever the program has put there by
then, so that its file is looked after whenever something is recorded or opened. (The monitor asks
for no stacks unless the file is open.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import weakref
from types import FrameType

from ...storage.safe_fd import HeldFile, nowhere
from .recorder import Recorder

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Real-time, since SIGUSR1 and SIGUSR2 belong to schedulers and users."""

_HEAD, _DEPTH = "Thread 0x{:016x} (most recent call first):\n", 100
"""As faulthandler writes it, and so many frames of one thread."""


class _Number:
    """As a file for faulthandler, which keeps it until it is given another."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        pass


class _Stacks:
    """Where faulthandler writes now.

    Attributes:
        signals: on which it does, each with whether the signal then does what it did before.
        crashes: what it has for crashes; dead once the program has chosen another file for them.
    """

    def __init__(self, file: HeldFile | None = None) -> None:
        self.file = file
        self.number = -1
        self.signals: dict[int, bool] = {}
        self.crashes: weakref.ref[_Number] | None = None
        self.busy = False

    def send_to(self, number: int) -> None:
        self.number = number
        for signum, chain in self.signals.items():
            faulthandler.register(signum, _Number(number), all_threads=False, chain=chain)
        if self.crashes is not None and self.crashes() is not None:
            self.catch_crashes(number)

    def catch_crashes(self, number: int) -> None:
        target = _Number(number)
        faulthandler.enable(target)
        self.crashes = weakref.ref(target)

    def send_nowhere(self) -> None:
        with contextlib.suppress(OSError), nowhere() as number:
            self.send_to(number)


_stacks = _Stacks()


def watch(recorder: Recorder) -> None:
    """Open the file, and have stacks written there."""
    global _stacks
    if threading.current_thread() is not threading.main_thread():
        return
    crashes_are_ours = _stacks.crashes is not None and _stacks.crashes() is not None
    file = HeldFile(recorder.directory / f"{recorder.stem}.stacks.txt")
    _stacks = new = _Stacks(file)
    new.signals[STACK_SIGNAL] = False
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        new.signals[signal.SIGTERM] = True
    if crashes_are_ours or not faulthandler.is_enabled():
        new.catch_crashes(file.fileno())
    keep()
    recorder.after_events = keep


def keep() -> None:
    """See to it that the number is still the file's."""
    stacks = _stacks
    if stacks.file is None or stacks.busy:
        return
    stacks.busy = True
    try:
        number = stacks.file.fileno()
        if number != stacks.number:
            stacks.send_to(number)
    except OSError:
        stacks.file = None
        stacks.send_nowhere()
    finally:
        stacks.busy = False


def dump() -> None:
    """Write where every thread but this one is, the main one last."""
    if (file := _stacks.file) is None:
        return
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    order = sorted(frames.keys() - {own}, key=lambda thread: thread == main)
    text = "".join(f"{_HEAD.format(n)}{_listed(frames[n])}\n" for n in order)
    del frames  # they keep what is in them
    file.write(text.encode(errors="replace"))


def _listed(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _DEPTH:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


def drop() -> None:
    """Have no more stacks written. The signals stay as they are: unhandled, they would kill."""
    stacks = _stacks
    file, stacks.file = stacks.file, None
    if file is not None:
        stacks.send_nowhere()
        file.close()


def _forked() -> None:
    """A child is not the rank; what it opens is its own."""
    _stacks.file = None
    if _stacks.signals:
        _stacks.send_nowhere()


os.register_at_fork(after_in_child=_forked)
