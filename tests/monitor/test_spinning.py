"""Hosts that spin while their devices wait do not count as computing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recordings import START, make_run, steps

from ddpdoctor.config import Options
from ddpdoctor.events import FlightEntry, FlightLog, GroupReady
from ddpdoctor.monitor import system
from ddpdoctor.monitor.spinning import may_spin
from ddpdoctor.monitor.stall_detector import WHILE_BUSY, RankProgress, Stall, StallDetector
from ddpdoctor.run import Run


def run_of(backend: str, done: bool) -> Run:
    ready = GroupReady(at=START, group=0, name="0", backend=backend, ranks=(0, 1), member=True,
                       site=-1)  # fmt: skip
    entry = FlightEntry(sequence=4, op="all_reduce", sizes="", dtypes="", retired=done)
    log = FlightLog(at=START + 20, group="0", entries=(entry,))
    return make_run({r: [ready, *steps(3), log] for r in range(2)})


@pytest.mark.parametrize(
    ("asked", "done", "busy"), [(0.0, False, True), (START + 10, False, False),
                                (START + 10, True, True), (START + 30, False, True)],
)  # fmt: skip
def test_what_the_flight_recorder_says(asked: float, done: bool, busy: bool) -> None:
    detector = StallDetector(Options(hang_after=10.0), lambda event: None, list)
    detector._ranks = {r: RankProgress(changed=0.0, cpu_at=0.0, cpu=1.0) for r in range(2)}
    detector._stall = Stall(START, asked=asked)
    assert detector.hang_after(run_of("nccl", done)) == (10 * WHILE_BUSY if busy else 10)


def test_only_where_hosts_run_ahead() -> None:
    assert may_spin(run_of("cpu:gloo,cuda:nccl", True))
    assert not may_spin(run_of("gloo", True))


def test_a_gpu_that_has_failed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise RuntimeError("GPU is lost")
        return index

    listed = [SimpleNamespace(pid=7, usedGpuMemory=5)]
    clients = [SimpleNamespace(pid=8, usedGpuMemory=None)]
    nvml: Any = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetName=lambda h: "H200",
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}", nvmlSystemGetDriverVersion=lambda: "570",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=141, used=1),
        nvmlDeviceGetMigMode=lambda h: (h == 2, False),
        nvmlDeviceGetComputeRunningProcesses=lambda h: listed if h == 0 else [],
        nvmlDeviceGetMPSComputeRunningProcesses=lambda h: clients if h == 2 else [],
    )  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    gpus = system.Gpus()
    assert gpus.uuids == ("GPU-0", "GPU-2")
    assert "GPU 1" in gpus.trouble
    assert gpus.divided == ("GPU-2",)
    assert gpus.by_process() == {7: {0: 5}, 8: {1: 0}}, "of MPS the clients, not the server"
