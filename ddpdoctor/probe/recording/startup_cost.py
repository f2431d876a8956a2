"""The time that the doctor takes to start in this process: its imports, and the wrapping of torch.

Most of it passes before the process is known to be a rank, so it is kept here until there is a
recorder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


class _Startup:
    since: int | None = time.perf_counter_ns()
    """When the current stretch of start-up began, first the imports of the probe; None if none."""
    spent_ns = 0
    emitted = False
    """A record has taken the time since the process began into account."""


_startup = _Startup()


def imported() -> None:
    """End the first stretch: the probe is imported."""
    _count()
    _startup.since = None


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the time spent inside as part of the start."""
    _startup.since = time.perf_counter_ns()
    try:
        yield
    finally:
        _count()
        _startup.since = None


def take_ns() -> int:
    """Nanoseconds spent on the start since the last call."""
    _count()
    spent, _startup.spent_ns = _startup.spent_ns, 0
    return spent


def before(now: float, spent_ns: int) -> float:
    """The begin of the time span in which a new record counts the doctor's share, in monotonic
    seconds: the start of the process; for later records, the start of `spent_ns` before `now`."""
    spent_s = spent_ns / 1e9
    age_s = 0.0 if _startup.emitted else _age_s()
    _startup.emitted = True
    return now - max(age_s, spent_s)


def _age_s() -> float:
    """Seconds since this process was started, 0 if the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _count() -> None:
    if _startup.since is not None:
        now = time.perf_counter_ns()
        _startup.spent_ns += now - _startup.since
        _startup.since = now


def _forked() -> None:
    _startup.since, _startup.spent_ns = None, 0  # it was the parent's time
    _startup.emitted = False


os.register_at_fork(after_in_child=_forked)
