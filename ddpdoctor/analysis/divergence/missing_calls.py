"""What a rank did in every earlier round and has left out in this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile

from ...run import Call, State
from ..calls.call_logs import CallRecord, GroupKey
from ..waiting.snapshot import RankSnapshot, Snapshot

LEAST = 2
"""Earlier rounds that have to agree."""


@dataclass(frozen=True)
class MissingCall:
    """A rank in a call of one group, without one of another group that it made before that in all
    earlier rounds.

    Attributes:
        stand: that rank, where it is now; waiting: who waits for it in the group.
        rounds: how many earlier ones there are to compare with.
    """

    stand: RankSnapshot
    waiting: RankSnapshot
    rounds: int


def left_out(now: Snapshot, ring: list[RankSnapshot]) -> MissingCall | None:
    """Who of a ring of ranks, each of which waits for the next, left a call out; None where that
    is not clear, or is said of several."""
    found = []
    for waiting, stand in zip(ring, [*ring[1:], ring[0]], strict=True):
        rounds = _rounds(now, stand, waiting.key) if waiting.key is not None else []
        *earlier, this = rounds or [0]
        if len(earlier) >= LEAST and all(earlier) and not this:
            found.append(MissingCall(stand, waiting, len(earlier)))
    return found[0] if len(found) == 1 else None


def _rounds(now: Snapshot, stand: RankSnapshot, key: GroupKey) -> list[int]:
    """How many calls of a group a rank made between one call like its present one and the next,
    round by round; the last number is that of this round."""
    at = stand.call
    counts: list[int] = []
    since = 0
    met = False
    for call in stand.rank.ring.calls if stand.rank.ring and at else ():
        if call.index < 0 or call.state is State.VOID:
            continue
        if at and (call.group, call.site) == (at.group, at.site):
            if met:
                counts.append(since)
            since, met = 0, True
        elif now.known.key(stand.rank, call.group) == key:
            since += 1
        if at and call.number == at.number:
            break
    return counts


@dataclass(frozen=True)
class Unsent:
    """A message that a rank exchanged with another one in all earlier rounds, and not in this one.

    Attributes:
        stand: that rank, where it is now; waiting: who waits for it.
        made: the call of a round before; rounds: how many earlier ones there are.
        usual: how often it made its present call in a row before that, where it does so once more
            in this one; 0 where it does not.
        ended: it has left the loop of these rounds since.
    """

    stand: RankSnapshot
    waiting: RankSnapshot
    made: CallRecord
    rounds: int
    usual: int = 0
    ended: bool = False


def unsent(now: Snapshot, ring: list[RankSnapshot]) -> Unsent | None:
    """Who of a ring of ranks, each of which waits for the next, left a message out; None where that
    is not clear, or is said of several."""
    pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
    found = [missed for pair in pairs if (missed := _missed(now, *pair)) is not None]
    return found[0] if len(found) == 1 else None


def _missed(now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot) -> Unsent | None:
    """The message that came next in all rounds before, if these were alike, of as many calls."""
    calls = _messages(stand, waiting.rank.rank)
    sites = [call.site for call in calls]
    last = len(sites) - 1
    if last < 0 or sites[last] not in sites[:last]:
        return _broken_off(now, waiting, stand)
    for long in range(1, last // (LEAST + 1) + 1):
        row = sites[last - long : last]
        if sites[last - LEAST * long : last] != row * LEAST:
            continue
        ends = [n for n in range(long, last) if sites[n - long : n] == row]
        if len({sites[n] for n in ends}) > 1:
            continue
        due = calls[last - long]
        if due.site == sites[last] or due.peer != waiting.rank.rank:
            return None
        made = now.known.point_to_point(stand.rank, due)
        if waiting.made is None or _kind(made) == _kind(waiting.made):
            return None  # it waits for another one
        again = _in_a_row(sites[last], reversed(sites[:last]))
        more = again > 0 and again + _in_a_row(due.site, sites[last - long :]) > 2
        return Unsent(stand, waiting, made, len(ends), again if more else 0)
    return None


def _broken_off(now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot) -> Unsent | None:
    """The message that followed in all rounds before on what a rank did last in a loop, which it
    has left: it is where it never was."""
    at = stand.call
    calls = [c for c in (stand.rank.ring.calls if stand.rank.ring else ()) if c is not at]
    calls = [c for c in calls if c.state is not State.VOID and at and c.number < at.number]
    if at is None or not calls or any(c.site == at.site for c in calls):
        return None
    *_, last = calls
    after = [then for call, then in pairwise(calls) if call.site == last.site]
    if len(after) < LEAST or len({(c.site, c.peer) for c in after}) > 1:
        return None
    due = after[-1]
    made = now.known.point_to_point(stand.rank, due)
    other = waiting.made is None or _kind(made) == _kind(waiting.made)
    if due.site == last.site or due.peer != waiting.rank.rank or other:
        return None
    return Unsent(stand, waiting, made, len(after), ended=True)


def _kind(made: CallRecord) -> str:
    """`send` or `recv`."""
    return made.signature.op.removeprefix("i")


def _in_a_row(site: int, sites: Iterable[int]) -> int:
    return sum(1 for _ in takewhile(lambda other: other == site, sites))


def _messages(stand: RankSnapshot, peer: int) -> list[Call]:
    """The messages between a rank and another one, and the calls that are like its present one,
    which is the last."""
    at = stand.call
    found: list[Call] = []
    for call in stand.rank.ring.calls if stand.rank.ring and at else ():
        if call.state is not State.VOID and at and (call.site == at.site or call.peer == peer):
            found.append(call)
        if at and call.number == at.number:
            break
    return found
