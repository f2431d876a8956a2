"""Whether a run that has no end on record is still going on: asked of the system, not of records.

On another machine nobody can be asked; there, a process that wrote lately counts as alive.
"""

from __future__ import annotations

import platform
import time

from ..events import MonitorStarted
from .rank import Facts, Rank
from .run import Run

LATELY_S = 300.0
_CLOCK_SLACK_S = 2.0


def note_alive(run: Run) -> None:
    """Set `Rank.alive` of every rank whose end is not on record."""
    for rank in run.ranks.values():
        rank.alive = False
        if run.info.ended_at is None and rank.state == "lost":
            rank.alive = _rank_there(rank)


def goes_on(run: Run) -> bool:
    """Whether a rank or a monitor of this run is still there; call `note_alive` first."""
    if run.info.ended_at is not None:
        return False
    return any(r.alive for r in run.ranks.values()) or any(map(_monitor_there, run.nodes.values()))


def _rank_there(rank: Rank) -> bool:
    said = rank.started
    if said is None or rank.last is None:
        return False
    return there(said.node, said.pid, said.wall, rank.wall(rank.last.at))


def _monitor_there(node: Facts) -> bool:
    said = node.first(MonitorStarted)
    if said is None or node.last is None:
        return False
    return there(said.node, said.pid, said.wall, said.wall + node.last.at - said.at)


def there(node: str, pid: int, started: float, heard: float) -> bool:
    """Whether that process, which began before `started` and was heard of at `heard`, still is."""
    if node != platform.node():
        return time.time() - heard < LATELY_S
    import psutil

    try:
        process = psutil.Process(pid)
        reused = process.create_time() > started + _CLOCK_SLACK_S
        return not reused and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):  # a record may hold any number
        return False
