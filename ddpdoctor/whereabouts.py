"""Where a rank stood when something ended it: in a call, or at a line of its stack."""

from __future__ import annotations

from .events import CallSite, RankStood, Signature
from .run import Call, Rank, Run, shorten

STOOD_S = 1.0
"""Before that it does not stand."""


def whereabouts(run: Run, rank: Rank) -> str:
    """`in barrier at train.py:31 for 28 s`, or `at train.py:14 in prepare`; empty where it went on
    until the end, or ended by itself."""
    ended = rank.ended
    if ended is None or ended.signal is None or rank.ring is None:
        return ""
    at = min(ended.at, rank.stopped.at) if rank.stopped else ended.at
    if at - rank.ring.progress_at < STOOD_S:
        return ""
    call = next((c for c in reversed(rank.ring.last_calls) if c.open_at(at)), None)
    return _in_call(rank, call, at) if call is not None else _at_line(run, rank)


def _in_call(rank: Rank, call: Call, at: float) -> str:
    op = next((s.op for s in rank.of(Signature) if s.id == call.signature), "a collective")
    site = next((s for s in rank.of(CallSite) if s.id == call.site), None)
    line = rank.location(site.line) if site else None
    return f"in {op}{f' at {line}' if line else ''} for {at - call.began:.0f} s"


def _at_line(run: Run, rank: Rank) -> str:
    pid = rank.started.pid if rank.started else 0
    every = [e for node in run.nodes.values() for e in node.of(RankStood)]
    own = [e for e in every if (e.rank, e.pid) == (rank.rank, pid)]
    frame = max(own, key=lambda e: e.at).user_frame if own else None
    if frame is None:
        return ""
    return f"at {shorten(frame.file, rank.cwd)}:{frame.line} in {frame.function}"
