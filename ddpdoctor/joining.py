"""Several records made one: the processes of a rank, the nodes of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .events import ProcessEnded, RankExiting, TorchLoaded
from .runfolder import RunInfo

if TYPE_CHECKING:
    from .run import Rank, Run


def joined_info(runs: Sequence[Run]) -> RunInfo:
    """One `run.json` for all nodes: it ended as it ended where it first went wrong."""
    infos = [run.info for run in runs]
    base = min(infos, key=lambda info: info.node_rank)
    if len(runs) == 1 or any(info.outcome is None for info in infos):
        return base if len(runs) == 1 else msgspec.structs.replace(base, outcome=None)
    bad = [run for run in runs if run.info.outcome != "completed"]
    worst = min(bad, key=_went_wrong).info if bad else base
    return msgspec.structs.replace(
        base,
        outcome=worst.outcome,
        exit_code=worst.exit_code,
        stopped_by_doctor=any(info.stopped_by_doctor for info in infos),
        ended_at=max((info.ended_at for info in infos if info.ended_at), default=None),
    )


def _went_wrong(run: Run) -> float:
    """When the first process of these nodes ended badly of itself."""
    ends = (e for node in run.nodes.values() for e in node.of(ProcessEnded))
    return min((e.wall for e in ends if not e.by_launcher and e.status != 0), default=math.inf)


def principal(records: list[Rank]) -> Rank:
    """The process that was the rank; the others become its twins.

    Of processes one after the other (a wrapper, a script that starts Python anew, a tool that
    it calls at the end) it is the one that did the most.
    """
    chosen = records[0]
    for other in records[1:]:
        in_turn = _over_before(chosen, other) or _over_before(other, chosen)
        if in_turn and _weight(other) >= _weight(chosen):
            chosen = other
    chosen.twins = [r for r in records if r is not chosen]
    return chosen


def _over_before(one: Rank, other: Rank) -> bool:
    if one.started is None or other.started is None:
        return False
    if one.started.pid == other.started.pid:  # exec: the same process, another program
        return one.started.wall < other.started.wall
    leaving = one.latest(RankExiting)
    return leaving is not None and one.wall(leaving.at) <= other.started.wall


def _weight(rank: Rank) -> tuple[bool, int, bool]:
    return rank.default_group is not None, rank.steps, bool(rank.of(TorchLoaded))
