"""Which line of the user's code started a thread. A thread of torch (of `async_save`, say) makes
collectives too, with no line of the user's code on its stack."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from .patching import around
from .recorder import Recorder

LOST = "which line started a thread"

_started: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()


def install() -> None:
    _started.clear()
    around(threading.Thread, "start", before=_starting, lost=LOST)


def _starting(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    here = recorder.sites.here()
    _started[args[0]] = here if here >= 0 else started_at()


def current() -> threading.Thread | None:
    """The current thread; None for the main one and for those that C++ started (autograd's)."""
    # Not `threading.current_thread()`: it would register a dummy for threads from C++.
    own = threading.get_ident()
    found = next((t for t in threading.enumerate() if t.ident == own), None)
    foreign = isinstance(found, threading._DummyThread)
    return None if foreign or found is threading.main_thread() else found


def started_at() -> int:
    """The site of the user's line that started this thread, or the thread that started this one;
    -1 if unknown."""
    own = current()
    return -1 if own is None else _started.get(own, -1)
