"""Records when processes end, to the millisecond.

torchrun polls at most ten times a second, so processes that end between two polls seem to end at
the same time. The first is the root cause of a failure, so a thread waits on the processes' pidfds.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time


class EndClock:
    """Records when watched processes end; records nothing where the kernel has no pidfds."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()

    def watch(self, pids: list[int]) -> None:
        """Watch these child processes; call it before any of them can have been waited for."""
        opened: dict[int, int] = {}
        with contextlib.suppress(AttributeError, OSError):  # older than Linux 5.3, or out of files
            for pid in pids:
                opened[os.pidfd_open(pid)] = pid
        if opened:
            threading.Thread(target=self._wait, args=(opened,), daemon=True).start()

    def ended(self, pid: int) -> float:
        """When a process ended, on the monotonic clock; the current time if that was not seen."""
        with self._lock:
            return self._ends.get(pid, time.monotonic())

    def _wait(self, opened: dict[int, int]) -> None:
        poll = select.poll()
        for fd in opened:
            poll.register(fd, select.POLLIN)
        while opened:
            ready = poll.poll()
            at = time.monotonic()
            for fd, _ in ready:
                with self._lock:
                    self._ends[opened.pop(fd)] = at
                poll.unregister(fd)
                os.close(fd)
