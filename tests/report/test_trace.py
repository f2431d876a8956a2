"""The trace for Perfetto: exact calls, slices that nest, arrows between ranks, clocks aligned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from recordings import START, started
from tapes import run_of, stall, stood, tapes
from toys import ToyHostile, ToyStep
from trace_format import violations

from ddpdoctor import render
from ddpdoctor.events import EpochBegan, EpochEnded, Event, MemorySample, Pace
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State


def trace_of(run: Run, *checks: Any) -> list[dict[str, Any]]:
    log = json.loads(render.perfetto(run, diagnose(run, checks, folder="runs/a")))
    assert not violations(log)
    events: list[dict[str, Any]] = log["traceEvents"]
    return events


def slices(events: list[dict[str, Any]], kind: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["tid"] // 100 == kind // 100]


def pace(step: int, at: float, wall: float = 0.1, optimizer: int = 0) -> Event:
    own = (0.01, 0.02, 0.03, 0.01, 0.0, 0.0, 0.0, 0.01)
    return Pace(at=START + at, optimizer=optimizer, step=step, count=8, wall_s=wall,
                waited_s=0.02, own_s=own)  # fmt: skip


def test_calls_and_who_came_first(tmp_path: Path) -> None:
    made = tapes()
    made[0].call("all_reduce", 10, at=START + 2, lasts=3.0)
    made[1].call("all_reduce", 10, at=START + 4, lasts=1.0)
    made[0].call("barrier", 11, at=START + 6, state=State.WAITING)
    run = run_of(tmp_path, made, nodes={0: [stood(0, 11, "dist.barrier()")]}, ended={0: -9, 1: -9})
    events = trace_of(run)
    calls = {(e["pid"], e["name"]): e for e in slices(events, 200)}
    assert calls[0, "all_reduce"]["dur"] == 3e6 and calls[1, "all_reduce"]["dur"] == 1e6
    assert calls[0, "all_reduce"]["ts"] - calls[1, "all_reduce"]["ts"] == -2e6
    assert calls[0, "all_reduce"]["args"]["line"] == "train.py:10"
    assert (0, "barrier (not over)") in calls
    assert calls[0, "barrier (not over)"]["dur"] > 1e6  # until its process was gone
    arrow = {e["ph"]: e["pid"] for e in events if e["ph"] in "stf"}
    assert arrow == {"s": 0, "f": 1}


def test_what_overlaps_has_lanes_of_its_own(tmp_path: Path) -> None:
    made = tapes(1)
    made[0].call("all_reduce", 10, at=START + 2, lasts=3.0)
    made[0].call("broadcast", 11, at=START + 3, lasts=3.0)
    more = [pace(7, 2.0), pace(15, 2.9), pace(3, 2.4, optimizer=1)]
    events = trace_of(run_of(tmp_path, made, more={0: more}))
    assert len({e["tid"] for e in slices(events, 200)}) == 2
    assert len({e["tid"] for e in slices(events, 100)}) == 2
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["tid"] for e in events if e["ph"] == "X"} <= named


def test_steps_epochs_and_memory(tmp_path: Path) -> None:
    more: list[Event] = [
        EpochBegan(at=START + 1, loader=0, epoch=0, step=0, site=1),
        pace(7, 2.0),
        MemorySample(at=START + 2, step=8, rss_bytes=300 << 20, peak_rss_bytes=0),
        EpochEnded(at=START + 3, loader=0, epoch=0, batches=9, samples=9, backwards=9,
                   exhausted=True),
        EpochBegan(at=START + 4, loader=0, epoch=1, step=8, site=1),
    ]  # fmt: skip
    events = trace_of(run_of(tmp_path, tapes(1), more={0: more}))
    window = next(e for e in slices(events, 100) if e["name"] == "steps 0-7")
    assert window["dur"] == 0.8e6
    inside = [e for e in slices(events, 100) if e is not window]
    assert [e["name"] for e in inside] == [
        "data", "forward", "backward", "optimizer", "other code", "waiting",
    ]  # fmt: skip
    assert sum(e["dur"] for e in inside) <= window["dur"]
    assert [e["name"] for e in slices(events, 300)] == [
        "epoch 0 of a loader",
        "epoch 1 of a loader",
    ]
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert counters["memory MB"] == {"host": 300}
    assert counters["step time ms"] == {"own": 80.0, "waiting": 20.0}


def test_windows_of_steps_follow_each_other(tmp_path: Path) -> None:
    """A median of steps may be longer than their average."""
    more = [pace(7, 2.0), pace(15, 2.7)]
    events = trace_of(run_of(tmp_path, tapes(1), more={0: more}))
    first, second = (e for e in slices(events, 100) if e["name"].startswith("steps "))
    assert first["tid"] == second["tid"]
    assert second["ts"] == first["ts"] + first["dur"]


def test_clocks_of_nodes_are_aligned_by_collectives(tmp_path: Path) -> None:
    made = tapes()
    for rank in (0, 1):
        for n in range(5):
            made[rank].call("all_reduce", 10, at=START + 2 + n, lasts=0.5)
    first = started(1, 2)
    more = {1: [replace(first, node="far", wall=first.wall + 240)]}
    events = trace_of(run_of(tmp_path, made, more=more))
    begins = {pid: [e["ts"] for e in slices(events, 200) if e["pid"] == pid] for pid in (0, 1)}
    assert begins[0] == begins[1]


def test_findings_are_marks_on_the_ranks_concerned(tmp_path: Path) -> None:
    from recordings import steps

    made = tapes()
    more = {rank: steps(9, site=1) for rank in (0, 1)}
    events = trace_of(run_of(tmp_path, made, more=more), ToyStep(), ToyHostile())
    marks = [e for e in events if e["ph"] == "i" and e["name"] == "DDP997 toy-step"]
    assert [e["pid"] for e in marks] == [0, 1]
    assert all(e["ts"] >= 0 for e in marks)


def test_an_empty_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, tapes(), nodes={0: [stall(START + 9, START + 3)]})
    assert {e["ph"] for e in trace_of(run)} <= {"M", "i"}
