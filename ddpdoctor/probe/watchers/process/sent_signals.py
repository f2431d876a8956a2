"""Which signals does the program send, and at which line?

Looked at when `os.kill`, `os.killpg` or `signal.raise_signal` is called, or a timer is started
whose end is a signal (`signal.alarm`, `signal.setitimer`). If a rank is killed, these records name
the sender.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ....events import SignalSent
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher

MOST_EMITTED = 16
"""Signals to other processes. An unhandled one to this process is the last and always recorded."""

TIMERS = {
    signal.ITIMER_REAL: signal.SIGALRM,
    signal.ITIMER_VIRTUAL: signal.SIGVTALRM,
    signal.ITIMER_PROF: signal.SIGPROF,
}
"""The signal that each timer of the system ends with."""


class SentSignals(Watcher):
    lost = "signals that ranks send"

    def __init__(self) -> None:
        self.emitted = 0
        self.timers: set[int] = set()  # lines that start them

    def install(self) -> None:
        self.emitted = 0
        self.timers.clear()
        watched = (
            (os, "kill", self._kills),
            (os, "killpg", self._kills_group),
            (signal, "raise_signal", self._raises),
            (signal, "alarm", self._alarms),
            (signal, "setitimer", self._starts_timer),
        )
        for owner, name, before in watched:
            self.around(owner, name, before=before)
            # Pickle looks a function up in its `__module__`. That of `os.kill` is `posix`, which
            # still holds the original, so name the module in which the wrapper stands.
            getattr(owner, name).__module__ = owner.__name__

    def _kills(self, recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        pid, number = args
        self._emit(recorder, os.getpid() if pid in (0, -os.getpgrp()) else pid, number)

    def _kills_group(self, recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        group, number = args
        if group in (0, os.getpgrp()):
            self._emit(recorder, os.getpid(), number)

    def _raises(self, recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        self._emit(recorder, os.getpid(), *args)

    def _alarms(self, recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        self._timed(recorder, signal.SIGALRM, *args)

    def _starts_timer(self, recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        which, seconds, *_rest = args
        self._timed(recorder, TIMERS[which], seconds)

    def _timed(self, recorder: Recorder, number: int, seconds: float) -> None:
        """A timer is started, if `seconds` is not 0. Each line that does so is told once."""
        if not seconds or (site := recorder.site()) in self.timers:
            return
        self.timers.add(site)
        self._emit(recorder, os.getpid(), number, timer=True)

    def _emit(self, recorder: Recorder, pid: int, number: int, *, timer: bool = False) -> None:
        if pid <= 0 or not number:  # signal 0 only asks whether the process exists
            return
        if pid == os.getpid():
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                return  # the program handles it and goes on
        elif self.emitted >= MOST_EMITTED:
            return
        else:
            self.emitted += 1
        sent = SignalSent(
            at=time.monotonic(), pid=pid, signal=int(number), site=recorder.site(), timer=timer
        )
        recorder.emit(sent, vital=True)
