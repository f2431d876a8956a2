"""From run folders to a `Run`: reading what is there, following what grows, joining nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ..events import Event, ProcessEnded, ProcessStarted
from ..storage.run_folder import Lines, RunFolder, RunInfo
from . import clocks
from .folding import FOLD_FROM, SAMPLES, Folding, sampled, sketches_of
from .merge_records import end_of, of_one_world
from .rank import Facts, Rank
from .run import Run
from .silent_nodes import silences

F = TypeVar("F", bound=Facts)

UNKNOWN = RunInfo(schema_version=0, id="", command=[], started_at="", tool_version="")


class Recording:
    """A run folder being read: call `refresh` as often as it may have grown."""

    def __init__(
        self, folder: RunFolder, clock: float | None = None, *, fold: bool = False
    ) -> None:
        """
        Args:
            clock: by how much the wall clock is ahead of the monotonic clock on which all times
                are to be told; None for that of the first node.
            fold: of ranks that did the same only some are read whole (see `folding`).
        """
        self.folder = folder
        self.clock = clock
        self._fold = fold
        self._files: dict[object, tuple[Lines, Facts]] = {}
        self._sampled: dict[Path, set[int]] = defaultdict(set)

    def refresh(self, attempt: int = 0) -> Run:
        """What the folder says now of one attempt."""
        records: dict[int, list[Rank]] = {}
        nodes: dict[int, Facts] = {}
        files: dict[int, list[tuple[Path, float]]] = {}
        monitors: list[tuple[int, Path, float]] = []
        for at, folder in ((None, self.folder), *self.folder.other_nodes()):
            ahead = 0.0 if at is None else folder.clock_ahead_s()
            for number, path in folder.rank_files(attempt):
                files.setdefault(number, []).append((path, ahead))
            monitors += [(n if at is None else at, path, ahead) for n, path in folder.node_files()]
        # Without --node-rank every node thinks it is the first.
        large = self._fold and len(files) >= FOLD_FROM
        for number, path, ahead in monitors:
            facts = self._follow(path, Facts(), ahead, SAMPLES if large else b"")
            if facts is not None:
                nodes[number] = facts
        folding = self._folding(files, nodes, attempt)
        for number, path, ahead in monitors if large else ():
            wanted = files.keys() - folding.models.keys() - self._sampled[path]
            self._sampled[path] |= wanted
            for event in sampled(path, wanted) if number in nodes else ():
                self._add(nodes[number], event, ahead)
        for number, paths in files.items():
            for path, ahead in paths if number not in folding.models else ():
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
        if not run.ranks.keys() >= {*folding.models.values()}:  # of another group
            self._fold = False
            return self.refresh(attempt)
        run.folds = folding.folds
        run.folded = {n: self._like(folding, n, files[n], run) for n in folding.models}
        if run.missing or not run.ranks:
            run.probe_error = self.folder.probe_error()
        return run

    def _folding(
        self,
        files: Mapping[int, Sequence[tuple[Path, float]]],
        nodes: Mapping[int, Facts],
        attempt: int,
    ) -> Folding:
        """Which ranks need not be read whole. None where several processes were one rank."""
        if not self._fold or len(files) < FOLD_FROM or any(len(p) > 1 for p in files.values()):
            return Folding(())
        ends: dict[int, ProcessEnded] = {}
        for event in (e for node in nodes.values() for e in node.of(ProcessEnded)):
            if event.attempt == attempt:
                ends[event.rank] = event
        silent = {r for event in silences(nodes.values()) for r in event.ranks}
        heard = [(number, path) for number, ((path, _),) in files.items() if number not in silent]
        sketches = list(sketches_of(heard))
        for sketch in sketches:
            if (end := ends.get(sketch.rank)) is not None:
                sketch.did["ended"] = end.status, end.signal, end.by_launcher
        return Folding(sketches)

    def _like(
        self, folding: Folding, number: int, paths: Sequence[tuple[Path, float]], run: Run
    ) -> Rank:
        """A folded rank."""
        rank = Rank(number)
        ((path, ahead),) = paths
        own = folding.fill(rank, run.ranks[folding.models[number]])
        if own and (offset := clocks.offset(own[0])) is not None:
            rank.shift = self._shift(offset, ahead)
        for event in own:
            self._add(rank, event, ahead)
        rank.path = path
        return rank

    @staticmethod
    def _add(facts: Facts, event: Event, ahead_s: float) -> None:
        if facts.shift or ahead_s:
            event = clocks.shifted(event, facts.shift, ahead_s)
        facts.add(event)

    def _shift(self, offset: float, ahead_s: float) -> float:
        self.clock = offset if self.clock is None else self.clock
        apart = offset - ahead_s - self.clock
        return apart if abs(apart) > clocks.SAME_S else 0.0

    def _follow(
        self, path: Path, fresh: F, ahead_s: float = 0.0, unwanted: bytes = b""
    ) -> F | None:
        """Everything in a file so far; None where it is no file of ours (a link, a folder).

        Args:
            ahead_s: by how much the wall clock of its node is ahead of the first one's.
            unwanted: how lines begin that are left out.
        """
        lines, facts = self._files.setdefault(path, (Lines(path), fresh))
        for event in lines.events(unwanted):
            if facts.last is None and (offset := clocks.offset(event)) is not None:
                facts.shift = self._shift(offset, ahead_s)
            self._add(facts, event, ahead_s)
        facts.unreadable, facts.torn = lines.unreadable, lines.torn
        facts.refused = f"{path.name} may not be read ({lines.refused})" if lines.refused else ""
        return None if lines.foreign else facts  # type: ignore[return-value]


def load(folders: Sequence[RunFolder], attempt: int = 0, *, fold: bool = False) -> Run:
    """One run from its folders, one per node. `fold`: as of `Recording`."""
    runs = []
    clock = None
    for folder in folders:
        recording = Recording(folder, clock, fold=fold)
        runs.append(recording.refresh(attempt))
        clock = recording.clock
    ranks: dict[int, Rank] = {}
    everyone: dict[int, Rank] = {}
    nodes: dict[int, Facts] = {}
    for run in runs:
        known = {*everyone}
        ranks.update(run.ranks)
        everyone.update(run.everyone)
        for number, node in run.nodes.items():
            its = {e.rank for e in node.of(ProcessStarted)}
            if its and its <= known:
                continue  # the first node has a copy of what another folder holds
            # Without --node-rank every node thinks it is the first.
            nodes[number if number not in nodes else max(nodes) + 1] = node
    joined = Run(joined_info(runs), ranks, nodes, attempt)
    joined.others = tuple(p for run in runs for p in run.others)
    joined.probe_error = next((run.probe_error for run in runs if run.probe_error), "")
    joined.folded = {n: r for run in runs for n, r in run.folded.items()}
    joined.folds = [fold for run in runs for fold in run.folds]
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
