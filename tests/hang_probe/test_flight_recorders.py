"""What is read from torch's flight recorders, whose numbers differ by backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch._C._distributed_c10d as c

from ddpdoctor.events import FlightLog
from ddpdoctor.probe.recording.torch_compat import flight_recorders
from ddpdoctor.storage.flight_dumps import parse


def flight_logs(dump: dict[str, Any]) -> list[FlightLog]:
    return [*parse(dump).logs(7.0)]


def entry(number: int, name: str = "nccl:all_reduce", **fields: Any) -> dict[str, Any]:
    """As torch's recorder of NCCL writes them; timing is off, so no start is known."""
    return {
        "record_id": number, "pg_id": 5, "process_group": ["107", "dp"], "is_p2p": False,
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": name,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "completed", "retired": True,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": 7, **fields,
    }  # fmt: skip


OPEN = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}


def test_the_status_of_a_group_goes_by_its_number_not_by_its_name() -> None:
    dump = {
        "entries": [entry(1), entry(2, **OPEN)],
        "pg_status": {
            "5": {"last_enqueued_collective": 2, "last_completed_collective": 1},
            "107": {"last_enqueued_collective": 90, "last_completed_collective": 90},
        },
    }
    (log,) = flight_logs(dump)
    assert (log.group, log.last_enqueued, log.last_completed) == ("107", 2, 1)
    assert [e.retired for e in log.entries] == [True, False]


def test_what_the_watchdog_let_go_of_is_not_done() -> None:
    (log,) = flight_logs({"entries": [entry(3, **{**OPEN, "retired": True})]})
    assert not log.entries[0].retired
    (log,) = flight_logs({"entries": [entry(3, "gloo:all_reduce", state="scheduled",
                                            time_discovered_completed_ns=0)]})  # fmt: skip
    assert log.entries[0].retired


def test_the_order_is_that_of_issue() -> None:
    """Parts of a coalesced call share a number; sends and receives have numbers of their own."""
    dump = {
        "entries": [
            entry(4, op_id=9), entry(3, op_id=8, input_sizes=[[2]]), entry(3, op_id=7),
            entry(3, op_id=7), entry(0, "nccl:recv 0<-1", is_p2p=True, p2p_seq_id=1),
        ]
    }  # fmt: skip
    (log,) = flight_logs(dump)
    assert [(e.sequence, e.sizes) for e in log.entries] == [
        (3, "[[4]]"),
        (3, "[[2]]"),
        (4, "[[4]]"),
    ]
    assert [(e.op, e.peer) for e in log.messages] == [("recv", 1)]


def test_both_recorders_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's is another symbol, which only builds with NCCL have."""

    def dump(name: str) -> Any:
        return lambda **_: json.dumps({"entries": [entry(1, name)]}).encode()

    monkeypatch.setattr(c, "_dump_nccl_trace_json", dump("nccl:broadcast"), raising=False)
    monkeypatch.setattr(c, "_dump_fr_trace_json", dump("gloo:barrier"))
    ops = [
        log.entries[0].op for text in flight_recorders() for log in flight_logs(json.loads(text))
    ]
    assert ops == ["broadcast", "barrier"]
