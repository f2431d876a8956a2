"""When waiting for a rank counts as a fault."""

from __future__ import annotations

import enum

from ...run import Run
from .failures import timed_out
from .snapshot import RankSnapshot, Snapshot
from .wait_graph import waiting_for


class Overdue(enum.Enum):
    """Why waiting counts as a fault: for the stall time, or until the backend's timeout."""

    STALL = enum.auto()
    TIMEOUT = enum.auto()


def overdue(run: Run, now: Snapshot, absent: list[RankSnapshot]) -> Overdue | None:
    """Why waiting for these ranks is a fault by now; None where it is not."""
    if now.stall is not None:
        return Overdue.STALL
    if now.failed:
        waiting = [s for a in absent for s in waiting_for(now, a)]
        return Overdue.TIMEOUT if any(timed_out(s.rank) for s in waiting) else None
    if run.now is not None or any(r.state == "finished" for r in run.ranks.values()):
        return None
    seen_by_monitor = any(node.last is not None for node in run.nodes.values())
    waited = max((s.still_s for a in absent for s in waiting_for(now, a)), default=0.0)
    return Overdue.STALL if waited >= now.hang_after and not seen_by_monitor else None
