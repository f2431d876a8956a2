"""Threads of a rank: which line of the user's code started one, and which are inside of a call. A
thread of torch (of `async_save`, say) makes collectives too, with no line of the user's code on its
stack, at the same time as the main one."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from .recorder import Recorder
from .watcher import Args, Kwargs, Watcher


class Threads(Watcher):
    lost = "which line started a thread"

    def __init__(self) -> None:
        self._started: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()

    def install(self) -> None:
        self.around(threading.Thread, "start", before=self._starting)

    def _starting(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        here = recorder.sites.here()
        self._started[args[0]] = here if here >= 0 else self.started_at()

    def started_at(self) -> int:
        """The site of the user's line that started this thread, or the thread that started this
        one; -1 if unknown."""
        own = current()
        return -1 if own is None else self._started.get(own, -1)


class Inside:
    """Which threads are inside of a call of some kind; true in these."""

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def __bool__(self) -> bool:
        return threading.get_ident() in self._threads

    def enter(self) -> None:
        self._threads.add(threading.get_ident())

    def leave(self) -> None:
        self._threads.discard(threading.get_ident())


def current() -> threading.Thread | None:
    """The current thread; None for the main one and for those that C++ started (autograd's)."""
    # Not `threading.current_thread()`: it would register a dummy for threads from C++.
    own = threading.get_ident()
    found = next((t for t in threading.enumerate() if t.ident == own), None)
    foreign = isinstance(found, threading._DummyThread)
    return None if foreign or found is threading.main_thread() else found
