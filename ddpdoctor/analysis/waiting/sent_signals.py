"""The line of the program that sent a signal to a rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ...events import SignalSent
from ...run import Location, Rank, Run
from .snapshot import RankSnapshot, Snapshot
from .thresholds import APART_S

_STOPS = (19, 20)
"""SIGSTOP and SIGTSTP, as Linux numbers them."""

_ENDS = (1, 2, 3, 4, 6, 7, 8, 9, 11, 15)
"""Signals that end a process that does not handle them."""


class Sent(NamedTuple):
    """The rank that sent a signal, its line, and the number; None where none did. `timer`: as of
    `SignalSent`."""

    by: Rank | None = None
    line: Location | None = None
    signal: int | None = None
    timer: bool = False


def ending(run: Run, rank: Rank) -> Sent:
    """The signal by which a process ended, if a rank sent it: also where nobody saw how it ended,
    but its record ends when it was sent."""
    known = rank.ended.signal if rank.ended else None
    if known is not None or (rank.ended is not None and rank.ended.status is not None):
        return sent(run, rank, [known])
    last = rank.wall(rank.last.at) if rank.last is not None else 0.0
    return sent(run, rank, _ENDS, last - APART_S)


def sent(run: Run, rank: Rank, numbers: Collection[int | None], since: float = 0.0) -> Sent:
    """The rank that sent one of these signals to a rank, itself first.

    Args:
        numbers: of the signals; since: seconds since the epoch.
    """
    pid = rank.started.pid if rank.started else -1
    for sender in sorted(run.ranks.values(), key=lambda one: one is not rank):
        if sender.node != rank.node:
            continue
        for event in reversed(sender.of(SignalSent)):
            known = event.pid == pid and event.signal in numbers
            if known and sender.wall(event.at) >= since:
                return Sent(sender, sender.location(event.site), event.signal, event.timer)
    return Sent()


def stopping(run: Run, now: Snapshot, stand: RankSnapshot) -> Sent:
    """The rank that sent the signal by which a rank is stopped; a signal before its last progress
    does not count."""
    if stand.stood is None or stand.stood.state != "T":
        return Sent()
    return sent(run, stand.rank, _STOPS, now.at - stand.still_s - APART_S)
