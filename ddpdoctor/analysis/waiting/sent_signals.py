"""The line of the program that sent a signal to a rank."""

from __future__ import annotations

from collections.abc import Collection

from ...events import SignalSent
from ...run import Location, Rank, Run
from .snapshot import RankSnapshot, Snapshot
from .thresholds import APART_S

_STOPS = (19, 20)
"""SIGSTOP and SIGTSTP, as Linux numbers them."""

Sent = tuple[Rank | None, Location | None]
"""The rank that sent it, and its line; None where none did."""


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
                return sender, sender.location(event.site)
    return None, None


def stopping(run: Run, now: Snapshot, stand: RankSnapshot) -> Sent:
    """The rank that sent the signal by which a rank is stopped; a signal before its last progress
    does not count."""
    if stand.stood is None or stand.stood.state != "T":
        return None, None
    return sent(run, stand.rank, _STOPS, now.at - stand.still_s - APART_S)
