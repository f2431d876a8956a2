"""Ranks that exited before `init_process_group` and will not come back."""

from __future__ import annotations

from ...events import NodeSample
from ...run import Rank, Run
from .rank_claims import Claim


def gone_for_good(run: Run, rank: Rank) -> bool:
    """Whether no process can take the place of a rank: its process, started by torchrun on a single
    node, exited with status 0, left no child processes, and no restart is left."""
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
    """Whether a call of `init_process_group` waits for all processes of the launcher, with the rank
    and at the address that the launcher set."""
    return claim.given_rank >= 0 and not claim.differs() and claim.at_launchers()
