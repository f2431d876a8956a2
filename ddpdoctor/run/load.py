"""From run folders to a `Run`: reading what is there, following what grows, joining nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ..events import ProcessEnded, ProcessStarted
from ..storage.run_folder import Lines, RunFolder, RunInfo
from . import clocks
from .merge_records import end_of, of_one_world
from .rank import Facts, Rank
from .run import Run
from .silent_nodes import silences

F = TypeVar("F", bound=Facts)

UNKNOWN = RunInfo(schema_version=0, id="", command=[], started_at="", tool_version="")


class Recording:
    """A run folder being read: call `refresh` as often as it may have grown."""

    def __init__(self, folder: RunFolder, clock: float | None = None) -> None:
        """`clock`: by how much the wall clock is ahead of the monotonic clock on which all times
        are to be told; None for that of the first node."""
        self.folder = folder
        self.clock = clock
        self._files: dict[object, tuple[Lines, Facts]] = {}

    def refresh(self, attempt: int = 0) -> Run:
        """What the folder says now of one attempt."""
        records: dict[int, list[Rank]] = {}
        nodes: dict[int, Facts] = {}
        for at, folder in ((None, self.folder), *self.folder.other_nodes()):
            ahead = 0.0 if at is None else folder.clock_ahead_s()
            for number, path in folder.node_files():
                if (facts := self._follow(path, Facts(), ahead)) is not None:
                    # Without --node-rank every node thinks it is the first.
                    nodes[number if at is None else at] = facts
            for number, path in folder.rank_files(attempt):
                if (rank := self._follow(path, Rank(number), ahead)) is None:
                    continue
                rank.path = path
                rank.look_again()
                records.setdefault(number, []).append(rank)
        for one in (r for several in records.values() for r in several):
            one.ended, one.stopped = end_of(one, nodes.values(), attempt)
            one.silent = None
        info = self.folder.read_info() or UNKNOWN
        if attempt != self.folder.attempts()[-1]:  # what stands there is how the last one ended
            info = msgspec.structs.replace(info, outcome=None, exit_code=None)
        for event in silences(nodes.values()):
            for one in (r for number in event.ranks for r in records.get(number, ())):
                one.silent = event
        ranks, others = of_one_world(records)
        run = Run(info, ranks, nodes, attempt)
        run.others = others
        for rank in run.ranks.values():
            rank.stalled = run.stall is not None
        return run

    def _follow(self, path: Path, fresh: F, ahead_s: float = 0.0) -> F | None:
        """Everything in a file so far; None where it is no file of ours (a link, a folder).

        Args:
            ahead_s: by how much the wall clock of its node is ahead of the first one's.
        """
        lines, facts = self._files.setdefault(path, (Lines(path), fresh))
        for event in lines.events():
            if facts.last is None and (offset := clocks.offset(event)) is not None:
                self.clock = offset if self.clock is None else self.clock
                apart = offset - ahead_s - self.clock
                facts.shift = apart if abs(apart) > clocks.SAME_S else 0.0
            if facts.shift or ahead_s:
                event = clocks.shifted(event, facts.shift, ahead_s)
            facts.add(event)
        facts.unreadable, facts.torn = lines.unreadable, lines.torn
        facts.refused = f"{path.name} may not be read ({lines.refused})" if lines.refused else ""
        return None if lines.foreign else facts  # type: ignore[return-value]


def load(folders: Sequence[RunFolder], attempt: int = 0) -> Run:
    """One run from its folders, one per node."""
    runs = []
    clock = None
    for folder in folders:
        recording = Recording(folder, clock)
        runs.append(recording.refresh(attempt))
        clock = recording.clock
    ranks: dict[int, Rank] = {}
    nodes: dict[int, Facts] = {}
    for run in runs:
        known = {*ranks}
        ranks.update(run.ranks)
        for number, node in run.nodes.items():
            its = {e.rank for e in node.of(ProcessStarted)}
            if its and its <= known:
                continue  # the first node has a copy of what another folder holds
            # Without --node-rank every node thinks it is the first.
            nodes[number if number not in nodes else max(nodes) + 1] = node
    joined = Run(joined_info(runs), ranks, nodes, attempt)
    joined.others = tuple(p for run in runs for p in run.others)
    return joined


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
    """When the first process of these nodes failed by itself, in seconds since the epoch;
    infinity for none."""
    ends = (e for node in run.nodes.values() for e in node.of(ProcessEnded))
    return min((e.wall for e in ends if not e.by_launcher and e.status != 0), default=math.inf)
