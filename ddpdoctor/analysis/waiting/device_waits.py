"""What devices wait for while their hosts are ahead of them, as with NCCL: a call returns once it
is issued, and the host blocks later, where it needs a result.

torch's flight recorder tells which collectives a device has not completed. Its numbers count the
calls of the backend (one for each bucket of DDP), those of a call log the calls of the program: the
two are never compared. Where there is no recorder, ranks that have issued fewer calls are behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import FlightEntry, FlightLog, Signature
from ...events.operations import OPERATIONS
from ...run import OF_DEVICES, Call, Rank, State
from ..calls.call_logs import CallLogs, GroupKey

SENDS = {name for name, o in OPERATIONS.items() if o.sends}
RECEIVES = {name for name, o in OPERATIONS.items() if o.receives}


def flight_log(rank: Rank, key: GroupKey) -> FlightLog | None:
    """The last record of torch's flight recorder for a group of a rank."""
    return next((f for f in reversed(rank.flight_logs()) if f.group == key.name), None)


def earliest(log: FlightLog) -> FlightEntry | None:
    """The first collective that is not completed. Later ones only queue behind it."""
    return next((entry for entry in log.entries if not entry.retired), None)


def enqueued(log: FlightLog) -> int:
    """The number of the last collective that was issued; -1 if unknown."""
    return max([log.last_enqueued, *(e.sequence for e in log.entries)])


def device_wait(known: CallLogs, rank: Rank) -> tuple[GroupKey, Call] | None:
    """The first call that a rank issued to its device and that waits there for another member of
    the group; None where none is known to."""
    found = [
        (key, call)
        for key, logs in known.logs.items()
        if key.on_device and rank.rank in logs and not completed(rank, key)
        for call in (_ahead_by_calls(known, key, rank) or _ahead_on_device(known, key, rank),)
        if call is not None
    ]
    found += _messages(known, rank)
    return min(found, key=lambda item: item[1].began, default=None)


def completed(rank: Rank, key: GroupKey) -> bool:
    """Whether the device has nothing to wait for in a group, as far as torch recorded."""
    log = flight_log(rank, key)
    if log is None or rank.ring is None or log.at < rank.ring.progress_at:
        return False
    if log.backend not in OF_DEVICES:
        return False
    return all(e.retired for e in (*log.entries, *log.messages))


def hosts_ahead(known: CallLogs) -> str:
    """What can be said where no rank is known to wait; empty where no host is ahead."""
    made = [(log.rank, key) for key, logs in known.logs.items() for log in logs.values()]
    if not any(key.on_device for _, key in made):
        return ""
    if all(completed(rank, key) for rank, key in made):
        return "torch's flight recorder has all calls completed: no device waits for another rank"
    # A rank that issued more may have left its group, so that it waits no longer.
    same = all(len({log.issued for log in logs.values()}) == 1 for logs in known.logs.values())
    return (
        f"the hosts are ahead of their devices{', and all ranks issued the same calls' * same}: "
        "for which rank a device waits is not on record"
    )


def _ahead_by_calls(known: CallLogs, key: GroupKey, rank: Rank) -> Call | None:
    """The first call that another member has not issued at all."""
    logs = known.logs[key]
    mine = logs[rank.rank]
    others = [r for r in key.ranks if r != rank.rank]
    members = [known.run.ranks[r] for r in others if r in known.run.ranks]
    if not all(m.ring is not None for m in members):
        return None
    issued = [logs[m.rank].issued if m.rank in logs else 0 for m in members]
    behind = min(issued, default=mine.issued)
    made = known.at(mine, behind) if behind < mine.issued else None
    return made.call if made is not None else None


def _ahead_on_device(known: CallLogs, key: GroupKey, rank: Rank) -> Call | None:
    """The last call, if another member lags behind within it: it has not issued a collective (the
    next bucket of a backward, say) that waits on this rank's device."""
    mine = known.logs[key][rank.rank]
    if not any(lags(known.run.ranks[r], rank, key) for r in key.ranks if r in known.run.ranks):
        return None
    made = known.at(mine, mine.issued - 1)
    return made.call if made is not None else None


def lags(other: Rank, rank: Rank, key: GroupKey) -> bool:
    """Whether another rank has not issued the first collective that waits on a rank's device."""
    ours, theirs = flight_log(rank, key), flight_log(other, key)
    first = earliest(ours) if ours is not None else None
    if first is None or rank is other:
        return False
    if theirs is None:  # it has issued none in this group, if it was asked
        return bool(other.flight_logs())
    return enqueued(theirs) < first.sequence


@dataclass(frozen=True)
class Mismatch:
    """Ranks whose devices wait in one collective of a group, and which is not the same for all.

    Attributes:
        number: as the flight recorder counts; by_rank: what each rank issued under it.
    """

    key: GroupKey
    number: int
    by_rank: dict[int, FlightEntry]


def mismatch(known: CallLogs) -> Mismatch | None:
    """A collective under which ranks that issued equally many calls have different ones on their
    devices: the buckets of a model, say, or its buffers."""
    for key, made in known.logs.items():
        if not key.on_device or len({log.issued for log in made.values()}) > 1:
            continue
        logs = {r: flight_log(known.run.ranks[r], key) for r in key.ranks if r in known.run.ranks}
        waits = {r: earliest(log) for r, log in logs.items() if log is not None}
        there = {r: entry for r, entry in waits.items() if entry is not None}
        if len({e.sequence for e in there.values()}) == 1 and _differ([*there.values()]):
            return Mismatch(key, next(iter(there.values())).sequence, there)
    return None


def _differ(entries: list[FlightEntry]) -> bool:
    """Whether ranks that issued these under one number can never complete them together."""
    uneven = any(word in entries[0].op for word in ("gather", "scatter", "to_all", "coalesced"))
    return len({(e.op, "" if uneven else (e.sizes, e.dtypes)) for e in entries}) > 1


def _messages(known: CallLogs, rank: Rank) -> Iterator[tuple[GroupKey, Call]]:
    """The first message to or from each peer for which that has issued no matching call. Rings keep
    the last calls only, so that it is told only where they have all."""
    ring, counts = rank.ring, dict[tuple[bool, int], int]()
    if ring is None or ring.count > len(ring.calls):
        return
    for call in ring.calls:
        key = known.key(rank, call.group) if call.index < 0 else None
        if key is None or not key.on_device or call.state in (State.FAILED, State.VOID):
            continue
        for sends, peer in _sides(known.point_to_point(rank, call).signature, call):
            count = counts[sends, peer] = counts.get((sends, peer), 0) + 1
            other = known.run.ranks.get(peer)
            if other is None or other.ring is None or other.ring.count > len(other.ring.calls):
                continue
            if messages(other, not sends, rank.rank) < count and not completed(rank, key):
                yield key, call
                return


def _sides(signature: Signature, call: Call) -> Iterator[tuple[bool, int]]:
    """Whether a call sends, and to or from whom, for each of its messages."""
    for sends, ops, several in (
        (True, SENDS, signature.sends),
        (False, RECEIVES, signature.receives),
    ):
        yield from ((sends, peer) for peer in ([call.peer] if signature.op in ops else several))


def messages(rank: Rank, sends: bool, peer: int, now: Call | None = None) -> int:
    """How many messages to (or from) a peer a rank has begun, without failed ones; the call that it
    is in `now` counts even if it failed."""
    known = {s.id: s for s in rank.of(Signature)}
    total = 0
    for call in rank.ring.calls if rank.ring else ():
        made = known.get(call.signature)
        failed = call.state is State.FAILED and (now is None or call.number != now.number)
        if made is not None and not failed:
            total += sum(side == (sends, peer) for side in _sides(made, call))
    return total
