"""Calls that a rank made in every earlier round and skipped in this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile

from ...run import Call, State
from ..calls.call_logs import CallRecord, GroupKey
from ..waiting.snapshot import RankSnapshot, Snapshot
from ..waiting.wait_graph import pairs
from .thresholds import HABIT


@dataclass(frozen=True)
class MissingCall:
    """A rank in a call of one group that skipped a call of another group, which it made before in
    all earlier rounds.

    Attributes:
        stand: that rank, where it is now; waiting: a rank that waits for it in the other group.
        rounds: how many earlier rounds there are.
    """

    stand: RankSnapshot
    waiting: RankSnapshot
    rounds: int


def left_out(now: Snapshot, ring: list[RankSnapshot]) -> MissingCall | None:
    """The rank of a cycle of waiting ranks that skipped a call; None where that is not clear, or
    holds for several."""
    found = []
    for waiting, stand in pairs(ring):
        rounds = _rounds(now, stand, waiting.key) if waiting.key is not None else []
        *earlier, this = rounds or [0]
        if len(earlier) >= HABIT and all(earlier) and not this:
            found.append(MissingCall(stand, waiting, len(earlier)))
    return found[0] if len(found) == 1 else None


def _rounds(now: Snapshot, stand: RankSnapshot, key: GroupKey) -> list[int]:
    """How many calls of a group a rank made in each round; the last number is that of this round. A
    round is what lies between two calls on the line of its present one."""
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
    """A message that a rank exchanged with another one in all earlier rounds, but not in this one.

    Attributes:
        stand: that rank, where it is now; waiting: the rank that waits for it.
        made: the call of an earlier round; rounds: how many earlier rounds there are.
        usual: how often it made its present call in a row in these, where it makes it once more in
            this round; 0 otherwise.
        ended: it has left the loop of these rounds since.
    """

    stand: RankSnapshot
    waiting: RankSnapshot
    made: CallRecord
    rounds: int
    usual: int = 0
    ended: bool = False


def unsent(now: Snapshot, ring: list[RankSnapshot]) -> Unsent | None:
    """The rank of a cycle of waiting ranks that skipped a message; None where that is not clear, or
    holds for several."""
    found = [missed for pair in pairs(ring) if (missed := _missed(now, *pair)) is not None]
    return found[0] if len(found) == 1 else None


def _missed(now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot) -> Unsent | None:
    """The message that came next in all rounds before, if these had the same calls."""
    calls = _messages(stand, waiting.rank.rank)
    sites = [call.site for call in calls]
    last = len(sites) - 1
    if last < 0 or sites[last] not in sites[:last]:
        return _broken_off(now, waiting, stand)
    for long in range(1, last // (HABIT + 1) + 1):
        row = sites[last - long : last]
        if sites[last - HABIT * long : last] != row * HABIT:
            continue
        ends = [n for n in range(long, last) if sites[n - long : n] == row]
        if len({sites[n] for n in ends}) > 1:
            continue
        due = calls[last - long]
        if due.site == sites[last] or due.peer != waiting.rank.rank:
            return None
        made = now.known.point_to_point(stand.rank, due)
        if waiting.made is None or _kind(made) == _kind(waiting.made):
            return None  # the other rank waits for another message
        again = _in_a_row(sites[last], reversed(sites[:last]))
        more = again > 0 and again + _in_a_row(due.site, sites[last - long :]) > 2
        return Unsent(stand, waiting, made, len(ends), again if more else 0)
    return None


def _broken_off(now: Snapshot, waiting: RankSnapshot, stand: RankSnapshot) -> Unsent | None:
    """The message that always followed the last call of a rank, where it left the loop instead: it
    is in a call that it never made before."""
    at = stand.call
    calls = [c for c in (stand.rank.ring.calls if stand.rank.ring else ()) if c is not at]
    calls = [c for c in calls if c.state is not State.VOID and at and c.number < at.number]
    if at is None or not calls or any(c.site == at.site for c in calls):
        return None
    *_, last = calls
    after = [then for call, then in pairwise(calls) if call.site == last.site]
    if len(after) < HABIT or len({(c.site, c.peer) for c in after}) > 1:
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
    """How many of the first sites are this one."""
    return sum(1 for _ in takewhile(lambda other: other == site, sites))


def _messages(stand: RankSnapshot, peer: int) -> list[Call]:
    """The messages of a rank with another one, and its calls on the line of its present one, which
    is the last."""
    at = stand.call
    found: list[Call] = []
    for call in stand.rank.ring.calls if stand.rank.ring and at else ():
        if call.state is not State.VOID and at and (call.site == at.site or call.peer == peer):
            found.append(call)
        if at and call.number == at.number:
            break
    return found
