"""When processes end, to the millisecond.

torchrun looks ten times a second or less, so that all who died within one look seem to die at
once. Who was first is the root of a failure, so a thread waits on the processes' pidfds.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time


class EndClock:
    """Notes when watched processes end; says nothing where the kernel has no pidfds."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()

    def watch(self, pids: list[int]) -> None:
        """Wait for these children of ours; call it before they can have been collected."""
        opened: dict[int, int] = {}
        with contextlib.suppress(AttributeError, OSError):  # older than Linux 5.3, or out of files
            for pid in pids:
                opened[os.pidfd_open(pid)] = pid
        if opened:
            threading.Thread(target=self._wait, args=(opened,), daemon=True).start()

    def ended(self, pid: int) -> float:
        """When a process that is gone ended, on the monotonic clock; now, where not noticed."""
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
