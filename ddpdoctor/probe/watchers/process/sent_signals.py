"""Signals that the program sends: where a rank ends by one, who sent it and at which line."""

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
"""Signals to other processes; one to its own that nothing handles is the last."""


class _Signals:
    emitted = 0


_signals = _Signals()


def install() -> None:
    _signals.emitted = 0
    watched = (os, "kill", _kills), (os, "killpg", _kills_group), (signal, "raise_signal", _raises)
    for owner, name, before in watched:
        around(owner, name, before=before, lost=LOST)
        # To be pickled it must be found where it says: its own module still has the original.
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
    if pid <= 0 or not number:  # 0 only asks whether it is there
        return
    if pid == os.getpid():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            return  # the program handles it, and goes on
    elif _signals.emitted >= MOST_EMITTED:
        return
    else:
        _signals.emitted += 1
    sent = SignalSent(at=time.monotonic(), pid=pid, signal=int(number), site=recorder.site())
    recorder.emit(sent, vital=True)
