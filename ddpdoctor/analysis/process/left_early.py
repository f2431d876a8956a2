"""Ranks that left before `init_process_group` and will not come."""

from __future__ import annotations

from ...events import NodeSample
from ...run import Rank, Run
from .rank_claims import Claim

SHORT_S = 600.0
"""A program that waits for less time than that goes on, or ends, by itself."""


def gone_for_good(run: Run, rank: Rank) -> bool:
    """Whether nobody comes in the place of a rank: what torchrun had started ended with status 0,
    nothing that it started in its turn was left, and it is not started again."""
    ended, reported = rank.ended, rank.started.environment if rank.started else {}
    if run.info.launcher != "run" or run.info.nodes > 1 or ended is None:
        return False
    if ended.by_launcher or ended.status != 0:
        return False
    restarts = reported.get("TORCHELASTIC_MAX_RESTARTS")
    if restarts is None or restarts != reported.get("TORCHELASTIC_RESTART_COUNT"):
        return False
    samples = (s for node in run.nodes.values() for s in node.of(NodeSample))
    return any(s.at > ended.at and s.orphans == 0 for s in samples)


def waits_for_all(claim: Claim) -> bool:
    """Whether a rank is to meet all that the launcher started, as the rank that it is there."""
    return claim.given_rank >= 0 and not claim.differs() and claim.at_launchers()
