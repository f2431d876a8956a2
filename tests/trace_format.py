"""A strict reader of the trace event format: what a trace does that the format does not allow.

Source: "Trace Event Format" of the Chromium project, JSON object format; and what Perfetto's
importer asks beyond it (slices of a track nest, a flow is bound to a slice that encloses it).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

COMMON = {"ph", "pid", "name", "args"}
FIELDS: dict[str, set[str]] = {
    "X": COMMON | {"tid", "ts", "dur"},
    "i": COMMON | {"tid", "ts", "s"},
    "C": COMMON | {"ts"},
    "M": COMMON | {"tid"},
    "s": COMMON - {"args"} | {"tid", "ts", "id", "cat", "bp"},
}
FIELDS |= dict.fromkeys("tf", FIELDS["s"])
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
SLACK_US = 0.2
"""Times are rounded to a tenth of a microsecond."""


def violations(log: Any) -> list[str]:
    """What is wrong with a trace, in words."""
    if set(log) - {"traceEvents", "displayTimeUnit", "otherData"}:
        return [f"unknown parts: {set(log)}"]
    if log.get("displayTimeUnit") not in ("ms", "ns"):
        return ["displayTimeUnit is neither ms nor ns"]
    events = log["traceEvents"]
    found = [f"{wrong}: {event}" for event in events for wrong in _event(event)]
    return found or [*_misnested(events), *_flows(events), *_unnamed(events)]


def _event(event: Event) -> Iterator[str]:
    fields = FIELDS.get(event.get("ph", ""))
    if fields is None:
        yield "unknown phase"
        return
    if event.keys() != fields:
        yield f"fields {event.keys() ^ fields} are missing or too many"
        return
    if not (isinstance(event["name"], str) and event["name"]):
        yield "no name"
    if any(not isinstance(event[k], int) or event[k] < 0 for k in ("pid", "tid") if k in event):
        yield "pid or tid is no number"
    for key in event.keys() & {"ts", "dur"}:
        value = event[key]
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"{key} is no time"
    args = event.get("args", {})
    if event["ph"] == "C" and not (args and all(_number(v) for v in args.values())):
        yield "a counter of no numbers"
    if event["ph"] == "i" and event["s"] not in ("g", "p", "t"):
        yield "unknown scope"
    if event["ph"] == "M" and args.keys() != {METADATA.get(event["name"])}:
        yield "unknown metadata"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_track(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def _misnested(events: list[Event]) -> Iterator[str]:
    for track, slices in _by_track(events).items():
        open_: list[float] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            open_ = [end for end in open_ if end > event["ts"] + SLACK_US]
            if open_ and event["ts"] + event["dur"] > open_[-1] + SLACK_US:
                yield f"{event['name']} on track {track} ends after the slice that it is in"
            open_.append(event["ts"] + event["dur"])


def _flows(events: list[Event]) -> Iterator[str]:
    tracks = _by_track(events)
    flows: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
            slices = tracks[event["pid"], event["tid"]]
            if not any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] + SLACK_US for s in slices):
                yield f"no slice encloses {event}"
    for key, parts in flows.items():
        if [p["ph"] for p in parts] != ["s", *"t" * (len(parts) - 2), "f"]:
            yield f"flow {key} has parts {[p['ph'] for p in parts]}"
        if any(a["ts"] > b["ts"] for a, b in itertools.pairwise(parts)):
            yield f"flow {key} runs backwards"


def _unnamed(events: list[Event]) -> Iterator[str]:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    used = _by_track(events).keys()
    yield from (f"track {track} has no name" for track in used - named)
    yield from (f"process {pid} has no name" for pid in {e["pid"] for e in events} - processes)
