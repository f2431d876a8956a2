"""The file that stacks are written to: when the monitor asks, on SIGTERM, and in a crash.

The thread that answers the monitor (`stack_server`) writes the stacks of all threads: while it has
the GIL none of them runs. If it cannot run, the monitor sends a signal, and faulthandler writes the
stack of the main thread alone: to read the stack of a running thread may crash the process.

faulthandler writes to the number of a descriptor, and the program may have closed that and opened
another file under the same number. So `keep` checks it whenever an event is recorded. (The monitor
asks for stacks only while the file is open.)
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
"""A real-time signal, since SIGUSR1 and SIGUSR2 are used by schedulers and programs."""

_HEAD, _DEPTH = "Thread 0x{:016x} (most recent call first):\n", 100
"""The head of a stack as faulthandler writes it, and its limit of frames."""


class _Number:
    """A descriptor as the file object that faulthandler wants and keeps alive."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        pass


class _Stacks:
    """Where faulthandler writes.

    Attributes:
        number: the descriptor that it has.
        signals: the signals on which it writes, each with whether the previous handler runs then.
        crashes: the file object it has for crashes. A dead reference means that the program has
            called `faulthandler.enable` with a file of its own, which is left alone.
        busy: `keep` is running.
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
    """Open the file and have stacks written there; from the main thread only, as signals need."""
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
    """Make sure that faulthandler's descriptor is our file; reopen it if the program closed it."""
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
    """Write the stacks of all threads but this one, the main thread's last."""
    if (file := _stacks.file) is None:
        return
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    order = sorted(frames.keys() - {own}, key=lambda thread: thread == main)
    text = "".join(f"{_HEAD.format(n)}{_listed(frames[n])}\n" for n in order)
    del frames  # they would keep their variables alive
    file.write(text.encode(errors="replace"))


def _listed(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _DEPTH:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)


def drop() -> None:
    """Write no more stacks. The handlers stay: an unhandled signal would kill the process."""
    stacks = _stacks
    file, stacks.file = stacks.file, None
    if file is not None:
        stacks.send_nowhere()
        file.close()


def _forked() -> None:
    """In a forked child, which is not the rank: write no stacks there, but when the monitor asks a
    worker of a loader for its own."""
    file, _stacks.file = _stacks.file, None
    if _stacks.signals:
        number = _stacks.number
        _stacks.send_nowhere()
        if file is not None:
            faulthandler.register(STACK_SIGNAL, _Number(number), all_threads=False, chain=False)


os.register_at_fork(after_in_child=_forked)
