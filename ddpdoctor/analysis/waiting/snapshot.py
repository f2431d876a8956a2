"""Where every rank was when the run stood still or began to fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...events import (
    STOPPED_STATES,
    Event,
    ExceptionRaised,
    MonitorStarted,
    ProcessEnded,
    RankExiting,
    RankStood,
    Signature,
    StallSeen,
    TorchLoaded,
)
from ...report.findings import Steps
from ...run import Call, Location, Phase, Rank, Run, State, silence_text, stopped_at
from ..calls.call_logs import CallLogs, CallRecord, GroupKey, call_logs
from .device_waits import device_wait, enqueued, flight_log, lags
from .failures import call_failed, destroyed, is_over, lost_peer
from .thresholds import BUSY, QUIET_S, STALL_S

DOING = {
    Phase.START: "starting",
    Phase.USER: "in the program's own code",
    Phase.DATA: "waiting for a batch of its DataLoader",
    Phase.FORWARD: "in a forward",
    Phase.BACKWARD: "in a backward",
    Phase.OPTIMIZER: "in optimizer.step",
    Phase.INIT: "in init_process_group",
    Phase.LEAVING: "exiting",
}

_KNOWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.INIT)
"""Phases whose line is recorded while they last."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank at the moment of a snapshot.

    Attributes:
        gone: its process had ended or was exiting, or it had destroyed its groups.
        call, key: the call it was in and the group of that; made: the call with its lines.
        computes: the forward or backward of a wrapped model that it was in without any
            communication in flight, or the call in which it was still importing modules.
        on_device: the call was issued, and it is its device that waits.
        over: gone, and its end can change nothing any more (see `is_over`).
        still_s: for how many seconds it had made no progress.
        stood: what the monitor saw of it.
    """

    rank: Rank
    gone: bool
    call: Call | None
    key: GroupKey | None
    made: CallRecord | None
    phase: Phase | None
    phase_site: int
    still_s: float
    stood: RankStood | None
    computes: Call | None = None
    on_device: bool = False
    over: bool = False

    @property
    def waits_for_good(self) -> bool:
        """Whether the rank makes no progress any more unless another rank does."""
        if self.rank.silent is not None:
            return False
        return self.over if self.gone else self.blocked and self.still_s >= QUIET_S

    @property
    def blocked(self) -> bool:
        """Whether the rank is in a collective or a point-to-point call."""
        return self.call is not None and not self.gone

    @property
    def unknown(self) -> bool:
        """Whether the rank used torch, but its calls were not recorded or cannot be read."""
        return self.rank.ring is None and self.rank.first(TorchLoaded) is not None

    @property
    def steps(self) -> Steps | None:
        """The optimizer step in which the rank was; None before the first one."""
        return Steps.of([self.rank.steps]) if self.rank.steps else None

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.stood is not None and self.stood.state in STOPPED_STATES

    @property
    def cpu(self) -> float | None:
        """Share of a core that the rank used; None where it was not measured."""
        return self.stood.cpu if self.stood is not None and self.stood.measured else None

    @property
    def busy(self) -> bool:
        """Whether the rank was seen to compute."""
        return self.cpu is not None and self.cpu > BUSY

    @property
    def location(self) -> Location | None:
        """The user's line at which the rank was."""
        if self.made is not None and self.made.location:
            return self.made.location
        frame = self.stood.user_frame if self.stood else None
        if frame is not None:
            return self.rank.frame_location(frame)
        return self.rank.location(self.phase_site)

    @property
    def surely(self) -> bool:
        """Whether the rank was at its `location` for certain, and not only last seen there: in the
        program's own code only a stack can tell."""
        if (self.made is not None and self.made.location) or (self.stood and self.stood.user_frame):
            return True
        return self.phase in _KNOWN

    @property
    def doing(self) -> str:
        """What the rank was doing, with the line: `in all_reduce (train.py:8)`."""
        where = self.location
        at = f"{' at' if self.surely else ', last seen at'} {where}" if where else ""
        if self.gone:
            return "gone"
        if self.rank.silent is not None:
            return f"on {silence_text(self.rank.silent, ', which')}"
        if self.stopped:
            traced = self.stood is not None and self.stood.state == "t"
            return f"{'stopped by a debugger' if traced else 'stopped by a signal (SIGSTOP)'}{at}"
        if self.made is not None:
            return f"{'waiting on the device for' if self.on_device else 'in'} {self.made.place}"
        if self.unknown:
            return at.lstrip(", ") or "at an unknown line (its calls are not on record)"
        what = DOING.get(self.phase, "") if self.phase is not None else "in no recorded call"
        if where and where.source.strip():
            return f"{what}{at} `{where.source.strip()}`"
        return f"{what}{at}"


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment.

    Attributes:
        at: the moment, in seconds since the epoch.
        stall: the monitor's record of a stall; None where it saw none.
        failed: the moment is that of the first failure.
        by_rank: rank to its snapshot; known: the calls of all ranks.
        until: when a rank moved again, or the last sign of life; seconds since the epoch.
        timed: it is on record how long ranks waited; not in what a run left behind.
    """

    at: float
    stall: StallSeen | None
    failed: bool
    by_rank: dict[int, RankSnapshot]
    known: CallLogs
    until: float = 0.0
    timed: bool = True

    def waited(self, stands: Iterable[RankSnapshot]) -> float:
        """For how many seconds the first of these ranks waited in the end."""
        still = max(s.still_s for s in stands)
        return still + max(0.0, self.until - self.at) if self.stall else still

    @property
    def hang_after(self) -> float:
        return self.stall.hang_after if self.stall else STALL_S

    @property
    def blocked(self) -> list[RankSnapshot]:
        return [s for s in self.by_rank.values() if s.blocked]

    def absent(self, stand: RankSnapshot) -> list[RankSnapshot]:
        """The members of a rank's group that had not begun its call, or were in it without having
        begun the communication for which the rank waits."""
        if stand.key is None or stand.call is None or stand.call.index < 0:
            return []
        return [
            other
            for r in stand.key.ranks
            if (other := self.by_rank.get(r)) is not None
            and r != stand.rank.rank
            and (
                not self._has_begun(other, stand.key, stand.call.index)
                or self._is_behind(other, stand, stand.key, stand.call.index)
            )
        ]

    def _is_behind(
        self, other: RankSnapshot, stand: RankSnapshot, key: GroupKey, index: int
    ) -> bool:
        """Whether another rank computes in the same call, and torch's flight recorder lists a
        collective in flight on this rank that has not begun on the other."""
        if stand.on_device:
            return lags(other.rank, stand.rank, key)
        call = other.computes
        if call is None or call.index != index or self.known.key(other.rank, call.group) != key:
            return False
        ours, theirs = flight_log(stand.rank, key), flight_log(other.rank, key)
        if ours is None or theirs is None or stand.call is None or ours.at < stand.call.began:
            return False
        return any(not e.retired and e.sequence > enqueued(theirs) for e in ours.entries)

    def _has_begun(self, other: RankSnapshot, key: GroupKey, index: int) -> bool:
        if other.rank.ring is None:
            return True  # its calls are not on record: nothing can be said
        log = self.known.logs.get(key, {}).get(other.rank.rank)
        if log is None or log.issued <= index:
            return False
        made = self.known.at(log, index)
        if made is None or made.call is None:
            return True
        return other.rank.wall(made.call.began) <= self.at


@lru_cache(maxsize=1)
def snapshot_of(run: Run) -> Snapshot:
    """All ranks at the stall, or else at the first failure, or else at the end of the records."""
    stall, at = run.stall or (None, 0.0)
    failed = False
    if stall is None:
        first = _first_failure(run)
        failed = first is not None
        at = first if first is not None else _last(run)
    known = call_logs(run)
    stands = {r.rank: _stand(run, known, r, at) for r in run.ranks.values()}
    until = _until(run, at) if stall else at
    return Snapshot(at=at, stall=stall, failed=failed, by_rank=stands, known=known, until=until,
                    timed=not run.left_behind)  # fmt: skip


def _until(run: Run, at: float) -> float:
    """When the first rank ended, or was terminated, after a moment; seconds since the epoch."""
    times = [stopped_at(node, run.attempt) for node in run.nodes.values()]
    for rank in run.ranks.values():
        ends = [*failures(rank), *(e.at for e in rank.of(RankExiting))]
        ends += [rank.ended.at] if rank.ended else []
        times += [rank.wall(end) for end in ends]
    return min((t for t in times if t is not None and t >= at), default=_last(run))


def failures(rank: Rank) -> Iterator[float]:
    """When a rank failed: its exception, or its end with an error; seconds on its own clock."""
    raised = rank.exception
    if raised is not None:
        yield call_failed(rank, raised) or raised.at
    elif (lost := _swallowed(rank)) is not None:
        yield lost
    ended = rank.ended
    if ended and not ended.by_launcher and (ended.signal is not None or ended.status):
        dumped = rank.flight_dump()
        yield dumped[-1].at if dumped else ended.at


def _swallowed(rank: Rank) -> float | None:
    """When a rank lost its peers, where its program caught that and continued; None where it did
    not, or where a later call completed, and for a barrier at the end, which nobody misses."""
    raised = rank.latest(ExceptionRaised)
    if raised is None or not raised.caught or rank.exception or not lost_peer(raised):
        return None
    failed = None
    for call in reversed(rank.ring.calls if rank.ring else ()):
        if call.state is State.FAILED:
            failed = call
        elif call.state is not State.VOID:
            break
    meant = next((s.op for s in rank.of(Signature) if failed and s.id == failed.signature), "")
    return failed.ended if failed and not meant.endswith("barrier") else None


def _first_failure(run: Run) -> float | None:
    times = [r.wall(t) for r in run.ranks.values() for t in failures(r)]
    return min(times, default=None)


def _last(run: Run) -> float:
    """The last moment on record, or now for a live run; seconds since the epoch."""
    times = []
    for rank in run.ranks.values():
        if run.now is not None:
            times.append(rank.wall(run.now))
        if rank.last is not None:
            times.append(rank.wall(rank.last.at))
        if rank.ring is not None:
            times.append(rank.wall(rank.ring.progress_at))
    for node in run.nodes.values():
        began = node.first(MonitorStarted)
        if began and node.last:
            times.append(node.last.at - began.at + began.wall)
    return max(times, default=0.0)


def _stand(run: Run, known: CallLogs, rank: Rank, wall: float) -> RankSnapshot:
    at = wall - rank.wall(0.0)
    ring = rank.ring
    call = None
    if ring is not None:
        opened = [c for c in ring.calls if c.open_at(at)]
        call = opened[-1] if opened else None
    key = known.key(rank, call.group) if call else None
    computes = None
    stood = _stood(run, rank)
    importing = run.stall is not None and stood is not None and stood.importing
    if call and key and (importing or _only_computes(known, rank, key, call)):
        computes, call, key = call, None, None
    on_device = False
    stands_still = run.stall is not None or rank.flight_dump()
    if call is None and stands_still and (waits := device_wait(known, rank)):
        key, call = waits
        on_device = True
    made = None
    if call is not None and key is not None and call.index >= 0:
        log = known.logs.get(key, {}).get(rank.rank)
        made = known.at(log, call.index) if log else None
    elif call is not None:
        made = known.point_to_point(rank, call)
    left = _left(rank, at)
    then = stood if run.stall and stood and stood.phase >= 0 else None
    return RankSnapshot(
        rank=rank,
        gone=left is not None,
        call=call,
        key=key,
        made=made,
        phase=Phase(then.phase) if then else ring.phase if ring else None,
        phase_site=then.phase_site if then else ring.phase_site if ring else -1,
        still_s=_still(rank, call, at, then),
        stood=stood,
        computes=computes,
        on_device=on_device,
        over=left is not None and is_over(run, rank, left, _looked(run, wall) - rank.wall(0.0)),
    )


def _only_computes(known: CallLogs, rank: Rank, key: GroupKey, call: Call) -> bool:
    """Whether a forward or backward of a wrapped model has no communication in flight.

    The call log knows only when these begin; torch's flight recorder knows when they communicate.
    """
    log = known.logs.get(key, {}).get(rank.rank)
    made = known.at(log, call.index) if log and call.index >= 0 else None
    if made is None or not made.signature.op.startswith("DDP "):
        return False
    seen = flight_log(rank, key)
    if seen is None or seen.at < call.began or (call.ended and seen.at > call.ended):
        return False
    return all(entry.retired for entry in seen.entries)


def _still(rank: Rank, call: Call | None, at: float, then: RankStood | None) -> float:
    """Seconds without progress until `at`, on the clock of the rank."""
    quiet = at - rank.ring.progress_at if rank.ring else 0.0
    if quiet <= 0 and then is not None:
        quiet = then.still_s
    if call is not None:
        inside = at - call.began
        return max(0.0, min(inside, quiet) if quiet > 0 else inside)
    return max(0.0, quiet)


def _looked(run: Run, wall: float) -> float:
    """Until when the run was observed: now, or when it was stopped; not before `wall`."""
    times = [wall]
    if run.now is not None:
        times += [r.wall(run.now) for r in run.ranks.values()]
    reported = (stopped_at(node, run.attempt) for node in run.nodes.values())
    return max([*times, *(at for at in reported if at is not None)])


def _left(rank: Rank, at: float) -> float | None:
    """When a rank began to leave, up to a moment on its clock; None where it had not."""
    marks: list[Event] = [*rank.of(RankExiting)]
    if (end := destroyed(rank, at)) is not None:
        marks.append(end)
    if isinstance(rank.ended, ProcessEnded):
        marks.append(rank.ended)
    return min((e.at for e in marks if e.at <= at), default=None)


def _stood(run: Run, rank: Rank) -> RankStood | None:
    seen: Iterable[RankStood] = (
        e
        for node in run.nodes.values()
        for e in node.of(RankStood)
        if e.rank == rank.rank and e.attempt == run.attempt
    )
    return max(seen, key=lambda e: e.at, default=None)
