"""What it takes the doctor to start in this process: its own imports, and the wrapping of torch.

Most of it comes before the process is known to be a rank, and has a recorder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


class _Startup:
    since: int | None = time.perf_counter_ns()
    """When what is going on began: here the imports of the probe. None where nothing is."""
    spent_ns = 0
    emitted = False
    """Whether the time since the process began is accounted for."""


_startup = _Startup()


def imported() -> None:
    """The probe is imported."""
    _count()
    _startup.since = None


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count what is done inside as part of the start."""
    _startup.since = time.perf_counter_ns()
    try:
        yield
    finally:
        _count()
        _startup.since = None


def take_ns() -> int:
    """Nanoseconds spent since this was asked last."""
    _count()
    spent, _startup.spent_ns = _startup.spent_ns, 0
    return spent


def before(now: float, spent_ns: int) -> float:
    """When the time began of which a record that begins now tells the doctor's share: with the
    process, or later in it with what the doctor did just before. Monotonic seconds."""
    spent_s = spent_ns / 1e9
    age_s = 0.0 if _startup.emitted else _age_s()
    _startup.emitted = True
    return now - max(age_s, spent_s)


def _age_s() -> float:
    """Seconds since this process was started, 0 where the system does not say."""
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
