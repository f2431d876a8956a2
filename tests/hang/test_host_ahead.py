"""Hangs where calls return when they are issued (NCCL): the hosts are ahead of their devices.

Calls last two milliseconds there, and the thread blocks later, where it needs a result.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ddpdoctor.checks.hang.collective_mismatch import CollectiveMismatch
from ddpdoctor.checks.hang.rank_died import RankDied
from ddpdoctor.checks.hang.rank_exited_early import RankExitedEarly
from ddpdoctor.checks.hang.rank_missing import RankMissing
from ddpdoctor.checks.hang.stall import Stall
from recordings import PID, steps
from tapes import START, WALL, CallLog, run_of, stall, stood

from ddpdoctor.analysis.waiting.device_waits import hosts_ahead
from ddpdoctor.events import (
    Event,
    FlightEntry,
    FlightLog,
    GroupReady,
    InitEntered,
    ProcessEnded,
    RankExiting,
)
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Confidence, Finding
from ddpdoctor.run import Run
from ddpdoctor.storage.call_ring import State

CHECKS = CollectiveMismatch(), RankMissing(), RankExitedEarly(), RankDied(), Stall()


def found(run: Run) -> tuple[Finding, ...]:
    return diagnose(run, CHECKS).findings


def trained(*more: Sequence[tuple[str, int]], backend: str = "nccl") -> dict[int, CallLog]:
    """Ranks that took three steps together, and then issued these calls (operation, line)."""
    made = {rank: CallLog(rank, len(more)) for rank in range(len(more))}
    for rank, tape in made.items():
        ready = tape.events[0]
        assert isinstance(ready, GroupReady)
        tape.events[0] = msgspec.structs.replace(ready, backend=backend)
        for _ in range(3):
            tape.call("DDP backward", 20, "loss.backward()", lasts=0.002)
        tape.events += steps(3)
        for op, line in more[rank]:
            tape.call(op, line, lasts=0.002)
    return made


def stalled(tmp_path: Path, made: dict[int, CallLog], nodes: list[Event], **more: object) -> Run:
    first = [*nodes, stall(START + 50, START + 5)]
    return run_of(tmp_path, made, nodes={0: first}, **{"ended": None, **more})  # type: ignore[arg-type]


BACKWARD = ("DDP backward", 20)
IN_ITEM = stood(0, 22, "total += loss.item()", cpu=1.0)
ASLEEP = stood(1, 33, "time.sleep(1000)")


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_rank_that_does_not_come(tmp_path: Path, backend: str) -> None:
    made = trained([BACKWARD], [], backend=backend)
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP]))
    assert (finding.check, finding.ranks) == ("rank-missing", (1,))
    assert finding.location is not None and finding.location.line == 33
    assert "rank 0" in finding.summary and "DDP backward" in finding.summary


def test_a_rank_that_left(tmp_path: Path) -> None:
    made = trained([BACKWARD], [])
    made[1].events.append(RankExiting(at=START + 4, how="return", status=0))
    ended = ProcessEnded(at=START + 6, rank=1, pid=PID + 1, wall=WALL, status=0)
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ended]))
    assert (finding.check, finding.ranks) == ("rank-exited-early", (1,))


def test_the_watchdog_ends_the_rank_that_waited(tmp_path: Path) -> None:
    """Its SIGABRT is a consequence; torchrun then terminates the rank at fault."""
    made = trained([BACKWARD], [])
    for tape in made.values():
        tape.events.append(
            InitEntered(at=START, backend="nccl", init_method="", rank=0, world_size=2,
                        timeout_s=40.0, env_rank=-1, env_world_size=-1, env_local_rank=-1, site=-1)
        )  # fmt: skip
    aborted = stood(0, 22, "total += loss.item()", crashed=True, native=True, at=START + 61)
    ends = [
        ProcessEnded(at=START + 61, rank=0, pid=PID, wall=WALL, signal=6),
        ProcessEnded(at=START + 62, rank=1, pid=PID + 1, wall=WALL, signal=15, by_launcher=True),
    ]
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP, aborted, *ends]))
    assert (finding.check, finding.ranks) == ("rank-missing", (1,))


def test_all_issued_the_same_calls(tmp_path: Path) -> None:
    made = trained([BACKWARD], [BACKWARD])
    seen = [IN_ITEM, stood(1, 22, "total += loss.item()", cpu=1.0)]
    (finding,) = found(stalled(tmp_path, made, seen))
    assert finding.check == "stall"
    assert "ahead of their devices, and all ranks issued the same calls" in finding.cause
    assert "no rank waits" not in finding.cause


@pytest.mark.parametrize("issued", [(3, 3), (3, 2)])
def test_equal_calls_are_claimed_only_where_they_are(issued: tuple[int, int]) -> None:
    """The rank that issued more may have destroyed its group."""
    rank: Any = SimpleNamespace(flight_logs=list)
    logs = {n: SimpleNamespace(rank=rank, issued=count) for n, count in enumerate(issued)}
    key = type("Key", (), {"on_device": True, "name": "0"})()
    known: Any = SimpleNamespace(logs={key: logs})
    said = hosts_ahead(known)
    assert "ahead of their devices" in said
    assert ("the same calls" in said) is (issued[0] == issued[1])


def test_calls_that_differ_stop_both(tmp_path: Path) -> None:
    made = trained([("all_reduce", 30)], [("broadcast", 40)])
    seen = [IN_ITEM, stood(1, 41, "print(value.item())", cpu=1.0)]
    findings = found(stalled(tmp_path, made, seen))
    assert findings[0].check == "collective-mismatch"
    assert not any(f.check == "stall" for f in findings)


def recorded(*done: bool, sizes: str = "[[4]]", backend: str = "nccl") -> FlightLog:
    """What torch's flight recorder has of so many all-reduces, once the rank stands still."""
    entries = (FlightEntry(n, "all_reduce", sizes, "Float", d) for n, d in enumerate(done, 1))
    return FlightLog(
        at=START + 50, group="0", entries=tuple(entries), last_enqueued=len(done), backend=backend
    )


def test_a_rank_that_lags_within_a_backward(tmp_path: Path) -> None:
    """Both have called it; the device of rank 0 waits for a bucket that rank 1 never issues."""
    made = trained([BACKWARD], [])
    made[1].call("DDP backward", 20, state=State.BEGUN)
    logs = {0: [recorded(True, True, True, False)], 1: [recorded(True, True, True)]}
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP], more=logs))
    assert (finding.check, finding.ranks) == ("rank-missing", (1,))
    assert finding.location is not None and finding.location.line == 33


def test_a_device_that_has_completed_all_waits_for_nobody(tmp_path: Path) -> None:
    made = trained([BACKWARD], [BACKWARD])
    logs = {rank: [recorded(True, True, True, True)] for rank in made}
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP], more=logs))
    assert finding.check == "stall"
    assert "no device waits" in finding.cause


def test_what_gloo_calls_retired_may_have_failed(tmp_path: Path) -> None:
    made = trained([BACKWARD], [], backend="hccl")
    logs = {0: [recorded(True, True, True, True, backend="gloo")]}
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP], more=logs))
    assert (finding.check, finding.ranks) == ("rank-missing", (1,))


def test_devices_in_different_collectives_below_equal_calls(tmp_path: Path) -> None:
    made = trained([BACKWARD], [BACKWARD])
    logs = {
        r: [recorded(True, True, True, False, sizes=s)] for r, s in enumerate(("[[4]]", "[[8]]"))
    }
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP], more=logs))
    assert (finding.check, finding.rule) == ("stall", "different-on-device")
    assert "rank 1: all_reduce of [[8]]" in finding.cause


@pytest.mark.parametrize(("sent", "check"), [(False, "rank-missing"), (True, "stall")])
def test_a_message_that_nobody_sends(tmp_path: Path, sent: bool, check: str) -> None:
    made = trained([], [])
    made[0].call("recv", 25, peer=1, lasts=0.002)
    if sent:
        made[1].call("send", 26, peer=0, lasts=0.002)
    (finding,) = found(stalled(tmp_path, made, [IN_ITEM, ASLEEP]))
    assert finding.check == check
    if not sent:
        assert finding.ranks == (1,)
        assert "recv (train.py:25)" in finding.summary


def dumped(folder: Path, rank: int, *done: bool) -> None:
    """What NCCL's watchdog leaves: the entry that timed out is retired, and not completed."""
    path = folder / f"flight-rank-{rank}"
    entries: list[dict[str, Any]] = [
        {
            "pg_id": 5, "process_group": ("0", "default_pg"), "is_p2p": False, "retired": True,
            "collective_seq_id": n, "op_id": n, "profiling_name": "nccl:all_reduce",
            "state": "completed" if d else "scheduled", "input_sizes": [[4]],
            "input_dtypes": ["Float"], "time_created_ns": int((WALL + 2) * 1e9),
        }
        for n, d in enumerate(done, 1)
    ]  # fmt: skip
    path.write_bytes(pickle.dumps({"entries": entries, "pg_status": {}}))
    os.utime(path, (WALL + 8, WALL + 8))


def test_what_the_watchdog_left_tells_who_is_missing(tmp_path: Path) -> None:
    """Its timeout is shorter than the stall time: the monitor has seen no stall."""
    made = trained([BACKWARD], [])
    aborted = stood(0, 22, "total += loss.item()", crashed=True, native=True, at=START + 9)
    nodes = {0: [
        aborted,
        ProcessEnded(at=START + 9, rank=0, pid=PID, wall=WALL, signal=6),
        ProcessEnded(at=START + 10, rank=1, pid=PID + 1, wall=WALL, signal=15, by_launcher=True),
    ]}  # fmt: skip
    (finding,) = found(run_of(tmp_path / "without", made, nodes=nodes, ended=None))
    assert finding.check == "rank-died"
    folder = tmp_path / "with" / "run"
    run = run_of(folder.parent, made, nodes=nodes, ended=None)
    dumped(folder, 0, True, True, True, False)
    dumped(folder, 1, True, True, True)
    (finding,) = found(run)
    assert (finding.check, finding.ranks) == ("rank-missing", (1,))
    assert finding.confidence is Confidence.PROVEN


def test_a_host_that_is_ahead_without_a_stall_waits_for_nobody(tmp_path: Path) -> None:
    made = trained([BACKWARD, BACKWARD], [BACKWARD])
    assert not found(run_of(tmp_path, made))
