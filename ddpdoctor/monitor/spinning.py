"""Ranks that use the CPU while they wait: in CUDA's default mode a host spins for its device."""

from __future__ import annotations

from ..events import FlightLog
from ..run import Run


def may_spin(run: Run) -> bool:
    """Whether what looks like computing may be waiting for a device."""
    return any(rank.runs_ahead for rank in run.ranks.values())


def devices_wait(run: Run, asked: float) -> bool:
    """Whether torch's flight recorder has calls that a device has not completed.

    Args:
        asked: when ranks were asked for it, as they stood still; 0 if they were not.
    """
    logs = (log for rank in run.ranks.values() for log in rank.of(FlightLog))
    recent = [log for log in logs if asked and log.at >= asked]
    return any(not e.retired for log in recent for e in (*log.entries, *log.messages))
