"""When waiting for a rank has become a fault."""

from __future__ import annotations

from ...run import Run
from .failures import timed_out
from .snapshot import RankSnapshot, Snapshot
from .wait_graph import waiting_for


def overdue(run: Run, now: Snapshot, absent: list[RankSnapshot]) -> str:
    """Why waiting for these is a fault by now (`stall`, `timeout`); empty where it is not."""
    if now.stall is not None:
        return "stall"
    if now.failed:
        waiting = [s for a in absent for s in waiting_for(now, a)]
        return "timeout" if any(timed_out(s.rank) for s in waiting) else ""
    if run.now is not None or any(r.state == "finished" for r in run.ranks.values()):
        return ""
    seen_by_monitor = any(node.last is not None for node in run.nodes.values())
    waited = max((s.still_s for a in absent for s in waiting_for(now, a)), default=0.0)
    return "stall" if waited >= now.hang_after and not seen_by_monitor else ""
