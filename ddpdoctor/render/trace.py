"""A run as a trace for https://ui.perfetto.dev, in the JSON trace event format of Chrome.

Each rank is a process with lanes for the phases of its steps, its collectives, what it loads (an
epoch of a loader is a slice), and its checkpoints and other files that it writes; arrows
lead from the rank that came first to a collective to the others; findings are marks on the ranks
that they concern; memory and step time are counters. Times are microseconds since the first rank
started. Source: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ..events import (
    CallSite,
    EpochBegan,
    EpochEnded,
    FileWritten,
    GroupReady,
    LoaderSeen,
    MemorySample,
    Pace,
    RankExiting,
    Signature,
)
from ..events.timing import PHASES
from ..report.findings import Finding, Report
from ..run import Call, Rank, Run, State
from .safe_text import clean

STEPS, CALLS, EPOCHS, SAVES = 100, 200, 300, 400
LANES = {STEPS: "phases", CALLS: "collectives", EPOCHS: "loading", SAVES: "checkpoints"}
"""By number, the names of a rank's lanes. What overlaps (the steps of two optimizers, asynchronous
calls) goes into the lanes after it, as the slices of one lane must not."""

TraceEvent = dict[str, Any]


def render(run: Run, report: Report) -> str:
    """The trace of a run: a JSON object with `traceEvents`."""
    clock = Clock(run)
    events: list[TraceEvent] = []
    placed: dict[int, dict[int, TraceEvent]] = {}
    for rank in run.ranks.values():
        shown = [e for lane in (_steps, _calls, _epochs, _saves) for e in lane(rank, clock)]
        events += [*_names(rank, report, shown), *shown, *_memory(rank, clock)]
        numbered = {e["args"]["call"]: e for e in shown if e.get("tid", 0) // 100 * 100 == CALLS}
        placed[rank.rank] = numbered
    events += _arrows(run, placed)
    for finding in report.findings:
        events += _marks(run, finding)
    events.sort(key=lambda e: (e.get("ts", -1), -e.get("dur", 0)))
    log = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"tool": f"ddpdoctor {report.tool.version}", "run": clean(report.run.folder)},
    }
    return msgspec.json.encode(log).decode() + "\n"


class Clock:
    """Microseconds since the first rank started, on one clock for all nodes: the ranks of a
    collective leave it at about the same moment, which tells how far a node's clock is off."""

    def __init__(self, run: Run, ranks: Iterable[Rank] | None = None) -> None:
        """`ranks`: those of which times are wanted; all where it is None."""
        asked = list(run.ranks.values() if ranks is None else ranks)
        self.start = run.started
        self.ahead: dict[str, float] = {}
        ends: dict[tuple[str, int], dict[str, float]] = {}
        first = next((r.node for r in asked), "")
        others = {r.node for r in asked} - {first}
        for rank in asked if others else ():
            for key, call in numbered(rank):
                if call.state is State.DONE:
                    ends.setdefault(key, {}).setdefault(rank.node, rank.wall(call.ended))
        for node in others:
            apart = [e[node] - e[first] for e in ends.values() if node in e and first in e]
            self.ahead[node] = statistics.median(apart) if apart else 0.0

    def at(self, rank: Rank, seconds: float) -> float:
        """A moment on a rank's monotonic clock, in seconds."""
        return self.since(rank, rank.wall(seconds))

    def since(self, rank: Rank, wall: float) -> float:
        return round((wall - self.start - self.ahead.get(rank.node, 0.0)) * 1e6, 1)


class _Lanes:
    """Finds a lane that is free, from the first one of a kind on."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._ends: list[float] = []

    def free(self, begin: float, end: float) -> int:
        """The lane for a slice. Slices come in the order in which they begin."""
        for place, over in enumerate(self._ends):
            if over <= begin:
                self._ends[place] = end
                return self._first + place
        self._ends.append(end)
        return self._first + len(self._ends) - 1


def _names(rank: Rank, report: Report, shown: list[TraceEvent]) -> Iterator[TraceEvent]:
    state = next((clean(r.state) for r in report.ranks if r.rank == rank.rank), "")
    yield _meta(rank, 0, "process_name", name=f"rank {rank.rank} ({clean(rank.node)}), {state}")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank.rank)
    for lane in sorted({*LANES, *(e["tid"] for e in shown if "tid" in e)}):
        yield _meta(rank, lane, "thread_name", name=LANES[lane // 100 * 100])
        yield _meta(rank, lane, "thread_sort_index", sort_index=lane)


def _meta(rank: Rank, lane: int, what: str, **given: object) -> TraceEvent:
    return {"ph": "M", "pid": rank.rank, "tid": lane, "name": what, "args": given}


def _slice(
    rank: Rank, lane: int, name: str, begin: float, end: float, given: Mapping[str, object]
) -> TraceEvent:
    return {
        "ph": "X",
        "pid": rank.rank,
        "tid": lane,
        "name": name,
        "ts": round(begin, 1),
        "dur": max(0.0, round(end - begin, 1)),
        "args": dict(given),
    }


def _steps(rank: Rank, clock: Clock) -> Iterator[TraceEvent]:
    """Windows of a few steps. What is inside of one are shares of its time, in the order of the
    phases, not moments: medians over the steps of the window are on record."""
    lanes = _Lanes(STEPS)
    before: dict[int, float] = {}
    for pace in sorted(rank.of(Pace), key=lambda p: p.at - p.count * p.wall_s):
        end = clock.at(rank, pace.at)
        # A median may be more than the average: no window begins before the last one ended.
        whole = min(pace.count * pace.wall_s * 1e6, end - before.get(pace.optimizer, -math.inf))
        before[pace.optimizer] = end
        lane = lanes.free(end - whole, end)
        first = pace.step - pace.count + 1
        figures = {
            "step s": pace.wall_s,
            "waited for other ranks s": pace.waited_s,
            "without a core s": pace.delayed_s,
        }
        name = f"step {pace.step}" if pace.count == 1 else f"steps {first}-{pace.step}"
        yield _slice(rank, lane, name, end - whole, end, figures)
        begin = end - whole
        parts = [(p, pace.own_s[n]) for n, p in enumerate(PHASES)]
        other = sum(pace.own_s[len(PHASES) :])
        for part, seconds in (*parts, ("other code", other), ("waiting", pace.waited_s)):
            if seconds > 0:
                long = min(pace.count * seconds * 1e6, max(0.0, end - begin))
                figures = {"s per step": seconds, "share of the window": True}
                yield _slice(rank, lane, part, begin, begin + long, figures)
                begin += long
        yield {"ph": "C", "pid": rank.rank, "name": "step time ms", "ts": end,
               "args": {"own": round((pace.wall_s - pace.waited_s) * 1e3, 3),
                        "waiting": round(pace.waited_s * 1e3, 3)}}  # fmt: skip


def _calls(rank: Rank, clock: Clock) -> Iterator[TraceEvent]:
    """The last calls of a rank, exactly; of one that it never left, until the end of its record."""
    ops = {s.id: s.op for s in rank.of(Signature)}
    lanes = _Lanes(CALLS)
    calls = sorted(rank.ring.calls if rank.ring else (), key=lambda c: c.began)
    for call in calls:
        if call.state is State.VOID or not call.began:
            continue
        begin = clock.at(rank, call.began)
        open_ = not call.ended
        end = clock.at(rank, _last(rank) if open_ else call.ended)
        name = ops.get(call.signature, "call")
        name = f"{name} (not over)" if open_ else name
        yield _slice(rank, lanes.free(begin, end), name, begin, end, {
            "call": call.number,
            "number in its group": call.index,
            "group": call.group,
            "step": call.step,
            "state": call.state.name.lower(),
            **({"peer": call.peer} if call.peer >= 0 else {}),
            **_line(rank, call),
        })  # fmt: skip


def _line(rank: Rank, call: Call) -> dict[str, object]:
    site = next((s for s in rank.of(CallSite) if s.id == call.site), None)
    place = rank.location(site.line) if site else None
    return {"line": clean(place), "source": clean(place.source).strip()} if place else {}


def _last(rank: Rank) -> float:
    """The last moment on a rank's record, or when its process was gone."""
    known = [rank.ring.progress_at] if rank.ring else []
    known += [rank.ended.at] if rank.ended else []
    return max([*known, *(e.at for e in rank), *_open_since(rank)], default=0.0)


def _open_since(rank: Rank) -> Iterator[float]:
    return (c.began for c in (rank.ring.calls if rank.ring else ()))


def _epochs(rank: Rank, clock: Clock) -> Iterator[TraceEvent]:
    names = {e.loader: e.dataset for e in rank.of(LoaderSeen)}
    ended = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    lanes = _Lanes(EPOCHS)
    for began in rank.of(EpochBegan):
        over = ended.get((began.loader, began.epoch))
        end = over.at if over else _last(rank)
        name = f"epoch {began.epoch} of {clean(names.get(began.loader, 'a loader'), 80)}"
        figures = {"batches": over.batches, "samples": over.samples} if over else {}
        begin, close = clock.at(rank, began.at), clock.at(rank, end)
        yield _slice(rank, lanes.free(begin, close), name, begin, close, figures)


def _saves(rank: Rank, clock: Clock) -> Iterator[TraceEvent]:
    lanes = _Lanes(SAVES)
    for event in rank.of(FileWritten):
        if event.ended:
            begin, end = clock.at(rank, event.at), clock.at(rank, event.ended)
            name = f"{event.how} {clean(event.path, 200)}"
            yield _slice(rank, lanes.free(begin, end), name, begin, end, {"step": event.step})
    for leaving in rank.of(RankExiting):
        yield _instant(rank, "leaves", clock.at(rank, leaving.at), {"how": clean(leaving.how)})


def _memory(rank: Rank, clock: Clock) -> Iterator[TraceEvent]:
    for sample in rank.of(MemorySample):
        figures = {"host": sample.rss_bytes >> 20}
        if sample.device_bytes:
            figures["device"] = sample.device_bytes >> 20
        yield {"ph": "C", "pid": rank.rank, "name": "memory MB", "ts": clock.at(rank, sample.at),
               "args": figures}  # fmt: skip


def numbered(rank: Rank) -> Iterator[tuple[tuple[str, int], Call]]:
    """The collectives in a rank's ring, by the name of their group and their number in it, which
    are the same on all ranks."""
    names = {g.group: g.name for g in rank.of(GroupReady) if g.member}
    for call in rank.ring.calls if rank.ring else ():
        if call.index >= 0 and call.group in names and call.began and call.state is not State.VOID:
            yield (names[call.group], call.index), call


def _arrows(run: Run, placed: Mapping[int, Mapping[int, TraceEvent]]) -> Iterator[TraceEvent]:
    """From the rank that came to a collective first to each of the others.

    Args:
        placed: by rank and number of the call, where it is shown.
    """
    parts: dict[tuple[str, int], list[TraceEvent]] = {}
    for rank in run.ranks.values():
        for key, call in numbered(rank):
            parts.setdefault(key, []).append(placed[rank.rank][call.number])
    for number, came in enumerate(parts.values()):
        came.sort(key=lambda part: part["ts"])
        for place, part in enumerate(came if len(came) > 1 else ()):
            phase = "s" if place == 0 else "f" if place == len(came) - 1 else "t"
            same = {"id": number, "name": "same collective", "cat": "collective", "bp": "e"}
            yield {"ph": phase, **{key: part[key] for key in ("pid", "tid", "ts")}, **same}


def _marks(run: Run, finding: Finding) -> Iterator[TraceEvent]:
    at = round((finding.at - run.started) * 1e6, 1) if finding.at else 0.0
    concerned: Iterable[int] = [r for r in finding.ranks if r in run.ranks] or run.ranks
    for number in concerned:
        yield _instant(run.ranks[number], f"{finding.code} {finding.check}", max(0.0, at), {
            "severity": finding.severity.value,
            "summary": clean(finding.summary, 1000),
            "line": clean(finding.location) if finding.location else "",
            "cause": clean(finding.cause, 1000),
        })  # fmt: skip


def _instant(rank: Rank, name: str, at: float, given: Mapping[str, object]) -> TraceEvent:
    return {"ph": "i", "s": "p", "pid": rank.rank, "tid": STEPS, "name": name, "ts": at,
            "args": dict(given)}  # fmt: skip
