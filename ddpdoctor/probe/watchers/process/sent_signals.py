"""Which signals does the program send, and at which line?

Looked at when `os.kill`, `os.killpg` or `signal.raise_signal` is called. If a rank is killed, these
records name the sender.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ....events import SignalSent
from ...recording.patching import around
from ...recording.recorder import Recorder

LOST = "signals that ranks send"
MOST_EMITTED = 16
"""Signals to other processes. An unhandled one to this process is the last and always recorded."""


class _Signals:
    emitted = 0


_signals = _Signals()


def install() -> None:
    _signals.emitted = 0
    watched = (os, "kill", _kills), (os, "killpg", _kills_group), (signal, "raise_signal", _raises)
    for owner, name, before in watched:
        around(owner, name, before=before, lost=LOST)
        # Pickle looks a function up in its `__module__`. That of `os.kill` is `posix`, which still
        # holds the original, so name the module in which the wrapper stands.
        getattr(owner, name).__module__ = owner.__name__


def _kills(recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    pid, number = args
    _emit(recorder, os.getpid() if pid in (0, -os.getpgrp()) else pid, number)


def _kills_group(recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    group, number = args
    if group in (0, os.getpgrp()):
        _emit(recorder, os.getpid(), number)


def _raises(recorder: Recorder, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    _emit(recorder, os.getpid(), *args)


def _emit(recorder: Recorder, pid: int, number: int) -> None:
    if pid <= 0 or not number:  # signal 0 only asks whether the process exists
        return
    if pid == os.getpid():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            return  # the program handles it and goes on
    elif _signals.emitted >= MOST_EMITTED:
        return
    else:
        _signals.emitted += 1
    sent = SignalSent(at=time.monotonic(), pid=pid, signal=int(number), site=recorder.site())
    recorder.emit(sent, vital=True)
