"""Several records made one: the processes of a rank, the nodes of a run."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..events import (
    InitEntered,
    MonitorStarted,
    ProcessEnded,
    ProcessStarted,
    RankExiting,
    SpawnEnded,
    Stopped,
    TorchLoaded,
)
from .rank import Facts, Rank

CLEAN_UP = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What a launcher sends to the ranks that are left; SIGKILL long after the others."""
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
SEEN_S = 1.0
"""A launcher looks at its processes that often, or more often."""


def end_of(
    rank: Rank, nodes: Iterable[Facts], attempt: int
) -> tuple[ProcessEnded | None, Stopped | None]:
    """What its node's monitor wrote of its end, and of who stopped the run. Of a rank whose record
    is lost, the end of whatever was that rank."""
    nodes = list(nodes)
    for node in nodes:
        for ended in node.of(ProcessEnded):
            pid = rank.started.pid if rank.started else ended.pid
            if (ended.rank, ended.pid, ended.attempt) == (rank.rank, pid, attempt):
                ended = _by_itself(rank, ended, node)
                return _as_spawn_saw(ended, node), stopped_in(node, attempt)
    mine = (node for node in nodes if (m := node.first(MonitorStarted)) and m.node == rank.node)
    return None, next((s for node in mine if (s := stopped_in(node, attempt))), None)


def stopped_in(node: Facts, attempt: int) -> Stopped | None:
    """Who stopped the run in that attempt; none where it was over: its processes had all ended, or
    another attempt had begun."""
    next_one = (e.at for e in node.of(ProcessStarted) if e.attempt > attempt)
    until = min(next_one, default=math.inf)
    ends = {e.pid: e.at for e in node.of(ProcessEnded) if e.attempt == attempt}
    started = [e.pid for e in node.of(ProcessStarted) if e.attempt == attempt]
    if started and all(pid in ends for pid in started):
        until = min(until, max(ends.values()))
    stops = [s for s in reversed(node.of(Stopped)) if s.at <= until]
    return next((s for s in stops if s.by != "launcher"), stops[0] if stops else None)


def stopped_at(node: Facts, attempt: int) -> float | None:
    """When somebody stopped the run in that attempt, in seconds since the epoch."""
    began, stop = node.first(MonitorStarted), stopped_in(node, attempt)
    return began.wall + stop.at - began.at if began and stop else None


def _by_itself(rank: Rank, ended: ProcessEnded, node: Facts) -> ProcessEnded:
    """Its end, where a launcher ended the others meanwhile: its own where it was about to leave
    with a bad status, or died of what the launcher did not send."""
    own = [e for e in node.of(ProcessEnded) if e.attempt == ended.attempt and not e.by_launcher]
    first = min((e for e in own if e.status or e.signal), key=lambda e: e.at, default=None)
    if first is None or not ended.by_launcher:
        return ended
    leaving = rank.latest(RankExiting)
    if leaving and leaving.status and leaving.at < first.at:
        status = leaving.status % 256  # all that the system keeps
        if ended.status == status or ended.signal in CLEAN_UP:
            return msgspec.structs.replace(ended, status=status, signal=None, by_launcher=False)
    sent = ended.signal in (None, *CLEAN_UP)
    if ended.signal == signal.SIGKILL:
        sent = first.signal != signal.SIGKILL or ended.at - first.at > SEEN_S
    elif ended.signal in CRASHES:  # because the launcher ended it
        sent = ended.signal != first.signal
    return ended if sent else msgspec.structs.replace(ended, by_launcher=False)


def _as_spawn_saw(ended: ProcessEnded, node: Facts) -> ProcessEnded:
    """How the process that spawned it saw it end, which alone could wait for it; where the first to
    end was a rank."""
    ranks = {e.pid for e in node.of(ProcessEnded)}
    for seen in (e for e in node.of(SpawnEnded) if e.pid in ranks):
        if seen.pid == ended.pid:
            how = {"status": seen.status, "signal": seen.signal}
            return msgspec.structs.replace(ended, **how, silent=False)
        if ended.pid in seen.told and ended.status is None:
            by_spawn = {"signal": signal.SIGTERM.value, "by_launcher": True}
            return msgspec.structs.replace(ended, **by_spawn, silent=False)
    return ended


def of_one_world(records: Mapping[int, list[Rank]]) -> tuple[dict[int, Rank], tuple[Rank, ...]]:
    """By number, the process that was the rank; and the processes that were ranks of other groups.

    A command may form several groups one after the other (it spawns two ranks, then four). Told is
    one of them: the newest while it goes on or where it ended badly, else the one that did the
    most.
    """
    every = [r for several in records.values() for r in several]
    anchor = _anchor(every) if len(every) > len(records) else None
    others = tuple(r for r in every if anchor is not None and not _together(anchor, r))
    ranks: dict[int, Rank] = {}
    for number, several in records.items():
        if mates := [r for r in several if r not in others]:
            ranks[number] = principal(mates)
            ranks[number].twins = [r for r in several if r is not ranks[number]]
    return ranks, others


def _anchor(every: Sequence[Rank]) -> Rank | None:
    """A process of the group that the report is about."""
    met = [r for r in every if r.default_group is not None] or every
    newest = max(met, key=_began, default=None)
    if newest is None or any(r.state != "finished" for r in every if _together(newest, r)):
        return newest
    return max(met, key=lambda r: (_weight(r), _began(r)))


def _began(rank: Rank) -> float:
    return rank.started.wall if rank.started else 0.0


def _together(one: Rank, other: Rank) -> bool:
    """Whether they may be ranks of one group. Who never asked for one may be of any of its size."""
    sizes = {size for rank in (one, other) if (size := _size(rank)) > 0}
    if len(sizes) > 1:
        return False
    in_turn = one.node == other.node and (_over_before(one, other) or _over_before(other, one))
    return one is other or not other.of(InitEntered) or not in_turn


def _size(rank: Rank) -> int:
    """The size of its process group, or the WORLD_SIZE it was started with; -1 if unknown."""
    if (group := rank.default_group) is not None:
        return len(group.ranks)
    return rank.started.world_size if rank.started else -1


def principal(records: Sequence[Rank]) -> Rank:
    """The process that was the rank.

    Of processes one after the other (a wrapper, a script that starts Python anew, a tool that
    it calls at the end) it is the one that did the most.
    """
    chosen = records[0]
    for other in records[1:]:
        in_turn = _over_before(chosen, other) or _over_before(other, chosen)
        if in_turn and _weight(other) >= _weight(chosen):
            chosen = other
    return chosen


def _over_before(one: Rank, other: Rank) -> bool:
    if one.started is None or other.started is None:
        return False
    if one.started.pid == other.started.pid:  # exec: the same process, another program
        return one.started.wall < other.started.wall
    end = one.latest(RankExiting) or one.ended
    return end is not None and one.wall(end.at) <= other.started.wall


def _weight(rank: Rank) -> tuple[bool, int, bool]:
    return rank.default_group is not None, rank.steps, bool(rank.of(TorchLoaded))
