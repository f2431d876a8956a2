"""What a rank did in every earlier round and has left out in this one."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.run import Call, State

from ._log import GroupKey, Made
from ._scene import Scene, Stand

LEAST = 2
"""Earlier rounds that have to agree."""


@dataclass(frozen=True)
class LeftOut:
    """A rank in a call of one group, without one of another group that it made before that in all
    earlier rounds.

    Attributes:
        stand: that rank, where it is now; waiting: who waits for it in the group.
        rounds: how many earlier ones there are to compare with.
    """

    stand: Stand
    waiting: Stand
    rounds: int


def left_out(now: Scene, ring: list[Stand]) -> LeftOut | None:
    """Who of a ring of ranks, each of which waits for the next, left a call out; None where that
    is not clear, or is said of several."""
    found = []
    for waiting, stand in zip(ring, [*ring[1:], ring[0]], strict=True):
        rounds = _rounds(now, stand, waiting.key) if waiting.key is not None else []
        *earlier, this = rounds or [0]
        if len(earlier) >= LEAST and all(earlier) and not this:
            found.append(LeftOut(stand, waiting, len(earlier)))
    return found[0] if len(found) == 1 else None


def _rounds(now: Scene, stand: Stand, key: GroupKey) -> list[int]:
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
        made: the call of the round before; rounds: how many earlier ones there are.
    """

    stand: Stand
    waiting: Stand
    made: Made
    rounds: int


def unsent(now: Scene, ring: list[Stand]) -> Unsent | None:
    """Who of a ring of ranks, each of which waits for the next, left a message out; None where that
    is not clear, or is said of several."""
    found = []
    for waiting, stand in zip(ring, [*ring[1:], ring[0]], strict=True):
        *earlier, this = _messages(stand, waiting.rank.rank)
        usual = set.intersection(*(set(e) for e in earlier)) if len(earlier) >= LEAST else set()
        for site in usual - set(this):
            made = now.known.point_to_point(stand.rank, earlier[-1][site])
            found.append(Unsent(stand, waiting, made, len(earlier)))
    return found[0] if len(found) == 1 else None


def _messages(stand: Stand, peer: int) -> list[dict[int, Call]]:
    """The messages between a rank and another one, by their line, from one call like its present
    one to the next, round by round; the last are those of this round."""
    at = stand.call
    rounds: list[dict[int, Call]] = []
    since: dict[int, Call] = {}
    for call in stand.rank.ring.calls if stand.rank.ring and at else ():
        if call.index >= 0 or call.state is State.VOID:
            continue
        if at and call.site == at.site:
            rounds.append(since)
            since = {}
        elif call.peer == peer:
            since[call.site] = call
        if at and call.number == at.number:
            break
    return rounds[1:] or [{}]  # what came before the first is no whole round
