"""Where a rank was when something ended it: in a call, in a phase of its step, at a line."""

from __future__ import annotations

from ..events import CallSite, RankSample, RankStood, Signature
from ..storage.call_ring import Call, Phase, Ring
from .location import shorten
from .rank import Rank
from .run import Run

STOOD_S = 1.0
"""Before that it does not stand."""

_PHASES = {
    Phase.DATA: "waiting for a batch",
    Phase.FORWARD: "in a forward",
    Phase.BACKWARD: "in a backward",
    Phase.OPTIMIZER: "in optimizer.step",
    Phase.INIT: "in init_process_group",
}


def whereabouts(run: Run, rank: Rank, *, live: bool = False) -> str:
    """`in barrier at train.py:31 for 28 s`, or `at train.py:14 in prepare`; empty where it went on
    until another process ended it, or ended by itself; in a `live` run, where it goes on."""
    ring = rank.ring
    if rank.state not in ("killed", "hung", "lost", *(["running"] if live else [])):
        return ""
    stood = _stood(run, rank)
    if stood is not None and stood.crashed and (line := _at_line(rank, stood)):
        return line
    if ring is None:  # it never came to a group
        seen = stood is not None and (rank.last is None or stood.at >= rank.last.at)
        return _at_line(rank, stood) if seen else ""
    at = _until(run, rank, ring, stood)
    call = next((c for c in reversed(ring.last_calls) if c.open_at(at)), None)
    if ring.progress_at > at and call is None:
        return _interrupted(rank)
    moved_at = call.began if call and ring.progress_at > at else ring.progress_at
    if (rank.signal or live) and at - moved_at < STOOD_S:
        return ""
    if call is not None:
        return _in_call(rank, call) + ("" if run.left_behind else _for(at - call.began))
    if stood is not None and stood.at >= ring.progress_at and (line := _at_line(rank, stood)):
        return line
    raised = rank.exception
    if raised is not None and raised.at >= ring.progress_at:
        return ""
    still = at - ring.progress_at
    how_long = "" if run.left_behind else _for(still)
    place = rank.location(ring.phase_site)
    if ring.phase in _PHASES:
        return f"{_PHASES[ring.phase]}{f' at {place}' if place else ''}{how_long}"
    if ring.phase is Phase.USER and still >= STOOD_S:
        return f"in its own code{f' since {place}' if place else ''}{how_long}"
    return ""


def _at_line(rank: Rank, stood: RankStood | None) -> str:
    frame = stood.user_frame if stood else None
    if frame is None:
        return ""
    return f"at {shorten(frame.file, rank.cwd)}:{frame.line} in {frame.function}"


def interrupted(rank: Rank) -> str:
    """The line that a `KeyboardInterrupt` met, where that ended the rank: `train.py:14 in main`."""
    raised = rank.exception
    if raised is None or raised.kind != "KeyboardInterrupt" or raised.caught:
        return ""
    frame = next((f for f in reversed(raised.frames) if f.user), None)
    if frame is None:
        return ""
    return f"{shorten(frame.file, rank.cwd)}:{frame.line} in {frame.function}"


def _interrupted(rank: Rank) -> str:
    """Where it stood that has gone on since, if only to its end."""
    place, raised = interrupted(rank), rank.exception
    if not place or raised is None or raised.still_s < STOOD_S:
        return ""
    return f"at {place}{_for(raised.still_s)}"


def _until(run: Run, rank: Rank, ring: Ring, stood: RankStood | None) -> float:
    """When it was ended; where that is not on record, when it was last heard of or seen."""
    if (ended := rank.ended) is not None:
        ends = (rank.stopped, rank.exception if interrupted(rank) else None)
        return min([ended.at, *(e.at for e in ends if e is not None)])
    samples = (e for n in run.nodes.values() for e in n.of(RankSample) if e.pid == rank.pid)
    times = (e.at for e in (rank.last, stood, *samples) if e is not None)
    heard: list[float] = [ring.progress_at, *times]
    return max(heard)


def _stood(run: Run, rank: Rank) -> RankStood | None:
    """What the monitor saw of it when the run stood still, or it crashed."""
    every = [e for node in run.nodes.values() for e in node.of(RankStood)]
    own = [e for e in every if (e.rank, e.pid) == (rank.rank, rank.pid)]
    return max(own, key=lambda e: e.at) if own else None


def _in_call(rank: Rank, call: Call) -> str:
    op = next((s.op for s in rank.of(Signature) if s.id == call.signature), "a collective")
    site = next((s for s in rank.of(CallSite) if s.id == call.site), None)
    line = rank.location(site.line) if site else None
    return f"in {op}{f' at {line}' if line else ''}"


def _for(seconds: float) -> str:
    return f" for {seconds:.0f} s" if seconds >= STOOD_S else ""
