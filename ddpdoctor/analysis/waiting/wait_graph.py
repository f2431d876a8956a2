"""The wait-for graph: which rank waits for which, what that proves, and when it is a fault."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ...report.findings import Evidence, Related
from ...run import Location, Phase, Run, fold_ranks, ranks_do
from .device_waits import RECEIVES, SENDS, messages
from .failures import ended_by_watchdog, timed_out
from .snapshot import RankSnapshot, Snapshot
from .thresholds import LINES_SHOWN, QUIET_S


def awaited(snapshot: Snapshot, stand: RankSnapshot) -> list[RankSnapshot]:
    """The ranks for which a rank waits in its call."""
    call = stand.call
    if call is None or stand.gone:
        return []
    if call.index >= 0:
        return snapshot.absent(stand)
    return _unique(m.peer for m in unanswered(snapshot, stand))


@dataclass(frozen=True)
class Unanswered:
    """Messages of a rank without a matching call on its peer.

    Attributes:
        sends: the rank sends, the peer should receive; otherwise the reverse.
        mine: how many the rank has begun; theirs: how many matching ones the peer has.
    """

    peer: RankSnapshot
    sends: bool
    mine: int
    theirs: int


def unanswered(snapshot: Snapshot, stand: RankSnapshot) -> list[Unanswered]:
    """The messages of a point-to-point call that the peer has not begun."""
    call, made = stand.call, stand.made
    if call is None or made is None or call.index >= 0:
        return []
    found = []
    signature = made.signature
    for sends, single, ops in (
        (True, signature.sends, SENDS),
        (False, signature.receives, RECEIVES),
    ):
        peers = {call.peer} if signature.op in ops else set(single)
        for peer in (snapshot.by_rank.get(p) for p in sorted(peers)):
            if peer is None:
                continue
            mine = messages(stand.rank, sends, peer.rank.rank, call)
            theirs = messages(peer.rank, not sends, stand.rank.rank, peer.call)
            if theirs < mine:
                found.append(Unanswered(peer, sends, mine, theirs))
    return found


def graph(snapshot: Snapshot) -> dict[int, list[int]]:
    """Each waiting rank, and the ranks for which it waits."""
    return {
        s.rank.rank: [o.rank.rank for o in awaited(snapshot, s)]
        for s in snapshot.blocked
        if awaited(snapshot, s)
    }


def cycle(snapshot: Snapshot) -> list[int]:
    """Ranks that wait for each other in a cycle, so that none can go on; empty for none.

    Only ranks without progress count: a call may be in flight.
    """
    return next(iter(cycles(snapshot)), [])


def cycles(snapshot: Snapshot) -> list[list[int]]:
    """All cycles of waiting ranks; no two of them have a rank in common."""
    edges = {
        r: [o for o in others if o in snapshot.by_rank and snapshot.by_rank[o].blocked]
        for r, others in graph(snapshot).items()
        if snapshot.failed or snapshot.by_rank[r].still_s >= QUIET_S
    }
    found: list[list[int]] = []
    for start in sorted(edges):
        ring = _walk(edges, [start])
        if ring and not any({*ring} & {*other} for other in found):
            found.append(ring)
    return found


def across_groups(ring: list[RankSnapshot]) -> bool:
    """Whether a cycle consists of collectives alone, which then are of several groups."""
    return all(s.call is not None and s.call.index >= 0 for s in ring)


def pairs(ring: list[RankSnapshot]) -> list[tuple[RankSnapshot, RankSnapshot]]:
    """Each rank of a cycle, and the one that it waits for."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def path(ring: list[RankSnapshot]) -> str:
    """A cycle as evidence: `0 -> 1 -> 0`."""
    return " -> ".join(str(s.rank.rank) for s in (*ring, ring[0]))


def wait_lines(stands: list[RankSnapshot], shown: Location | None = None) -> tuple[Related, ...]:
    """The lines at which ranks wait, but for the line that is shown already."""
    lines: dict[Location, set[int]] = {}
    for stand in stands:
        if stand.location is not None and stand.location != shown:
            lines.setdefault(stand.location, set()).add(stand.rank.rank)
    found = (Related(f"{ranks_do(ranks, 'wait')} here", spot) for spot, ranks in lines.items())
    return tuple(found)[:LINES_SHOWN]


def _walk(edges: dict[int, list[int]], path: list[int]) -> list[int]:
    for following in edges.get(path[-1], []):
        if following in path:
            return path[path.index(following) :]
        if following in edges and (found := _walk(edges, [*path, following])):
            return found
    return []


def missing(snapshot: Snapshot) -> list[RankSnapshot]:
    """Ranks for which others wait and which are neither in a call themselves nor gone."""
    return _unique(
        o for s in snapshot.blocked for o in awaited(snapshot, s) if not o.gone and not o.blocked
    )


def gone(snapshot: Snapshot) -> list[RankSnapshot]:
    """Ranks for which others wait and which have left."""
    return _unique(o for s in snapshot.blocked for o in awaited(snapshot, s) if o.gone)


def waiting_for(snapshot: Snapshot, stand: RankSnapshot) -> list[RankSnapshot]:
    """The ranks that wait for one rank directly."""
    return [s for s in snapshot.blocked if any(o is stand for o in awaited(snapshot, s))]


def in_init(snapshot: Snapshot) -> list[RankSnapshot]:
    """Ranks that are in `init_process_group`."""
    return [s for s in snapshot.by_rank.values() if s.phase is Phase.INIT and not s.gone]


def _unique(stands: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    return list({s.rank.rank: s for s in stands}.values())


def victims(snapshot: Snapshot, waiting: list[RankSnapshot]) -> Evidence:
    """Evidence of which ranks waited where, and for how many seconds."""
    rows: dict[str, list[RankSnapshot]] = {}
    for stand in waiting:
        rows.setdefault(stand.doing, []).append(stand)
    return {
        "waiting": [
            {
                "ranks": fold_ranks(s.rank.rank for s in stands),
                "where": doing,
                **({"seconds": round(snapshot.waited(stands), 1)} if snapshot.timed else {}),
            }
            for doing, stands in rows.items()
        ]
    }


def merged_stacks(snapshot: Snapshot) -> list[dict[str, object]]:
    """The stacks of all ranks, equal ones merged, the rank with the least progress first."""
    classes: dict[tuple[str, ...], list[RankSnapshot]] = {}
    for stand in snapshot.by_rank.values():
        frames = stand.stood.frames if stand.stood else ()
        lines = tuple(
            f"{f.function} ({f.file.rpartition('/')[2]}:{f.line})"
            for n, f in enumerate(frames)
            if f.user or n == 0
        )
        classes.setdefault(lines[:6], []).append(stand)
    ordered = sorted(classes.items(), key=lambda item: min(_progress(s) for s in item[1]))
    return [
        {
            "ranks": fold_ranks(s.rank.rank for s in stands),
            "stack": " <- ".join(lines) or "no stack could be taken",
            "step": min(s.rank.steps for s in stands),
            "calls": min(s.rank.ring.count if s.rank.ring else 0 for s in stands),
        }
        for lines, stands in ordered
    ]


def _progress(stand: RankSnapshot) -> tuple[int, int]:
    return stand.rank.steps, stand.rank.ring.count if stand.rank.ring else 0


def pending(now: Snapshot) -> list[str]:
    """Calls that torch's flight recorder lists as not completed, one line each."""
    lines = []
    for stand in now.by_rank.values():
        latest = {log.group: log for log in stand.rank.flight_logs()}
        for log in latest.values():
            group = "" if len(latest) == 1 else f"group {log.group}: "
            for entry in (e for e in (*log.entries, *log.messages) if not e.retired):
                what = f"{entry.op} {entry.sizes}"
                if entry.peer >= 0:
                    side = "from" if entry.op in RECEIVES else "to"
                    what = f"{entry.op} {side} rank {entry.peer} {entry.sizes}"
                else:
                    what = f"{entry.sequence} {what}"
                lines.append(f"rank {stand.rank.rank}: {group}{what}")
    return lines[:20]


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
        ended = (s.rank for s in waiting if timed_out(s.rank) or ended_by_watchdog(run, s.rank))
        return Overdue.TIMEOUT if any(ended) else None
    if run.now is not None or any(r.state == "finished" for r in run.ranks.values()):
        return None
    seen_by_monitor = any(node.last is not None for node in run.nodes.values())
    waited = max((s.still_s for a in absent for s in waiting_for(now, a)), default=0.0)
    return Overdue.STALL if waited >= now.hang_after and not seen_by_monitor else None
