"""Where is a rank while the others wait for it? Asked of the rank itself, which answers in its own
record (`Working`)."""

from __future__ import annotations

from collections.abc import Iterable

from ..run import Rank
from ..storage.call_ring import ASK_LINES, Phase, Ring
from .stall_detector import ask, waits

HELD_S = 0.01
"""Ranks are never exactly together: shorter waits are not asked about."""

ASKED_PER_AGE = 64
"""Questions to a rank come at least `age / ASKED_PER_AGE` apart."""

_AT_WORK = (Phase.USER, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)


class LateRanks:
    """Asks ranks of this node that work on their own while others wait; call `look` at every
    tick."""

    def __init__(self) -> None:
        self._next: dict[int, float] = {}

    def look(self, live: Iterable[Rank], began: float, now: float) -> None:
        """Ask the ranks that the others wait for, if there are any.

        Args:
            live: the ranks of this node whose processes are alive.
            began: when the run did; `now`: both on the monotonic clock.
        """
        rings = [(rank, rank.ring) for rank in live if rank.ring is not None]
        waiting = {rank.pid for rank, ring in rings if _held(ring, now) and _waits(ring)}
        for rank, ring in rings if waiting else ():
            due = now >= self._next.get(rank.pid, 0.0) and _held(ring, now)
            if due and _may_work(ring) and waiting - {rank.pid}:
                self._next[rank.pid] = now + (now - began) / ASKED_PER_AGE
                ask(rank, ASK_LINES)


def _may_work(ring: Ring) -> bool:
    """Whether a rank works on its own, or may do so: in a backward, where it is shows whether it
    waits there or is in a hook."""
    at_work = ring.phase in _AT_WORK and not waits(ring)
    return ring.step > 0 and (at_work or ring.phase is Phase.BACKWARD)


def _held(ring: Ring, now: float) -> bool:
    """Whether a rank has been where it is for a while."""
    return bool(now - ring.progress_at >= HELD_S)


def _waits(ring: Ring) -> bool:
    """Whether a rank waits for others, or may do so in DDP's backward."""
    return ring.phase is Phase.BACKWARD or waits(ring)
