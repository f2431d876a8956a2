"""DDP201 over literal events, and what the probe records of a gather."""

from __future__ import annotations

from typing import Any

import pytest
from ddpdoctor.checks.memory.dp_output_imbalance import DpOutputImbalance
from gpus import GB, gpu_run, held
from recordings import make_run

from ddpdoctor.events import DataParallelMade, DeviceMemory, Event, Gathered, GatheredTensor
from ddpdoctor.report.findings import Finding
from ddpdoctor.run import Run


def made(*devices: int) -> Event:
    return DataParallelMade(
        at=0, model=0, kind="Net", site=1, devices=devices, output_device=0 if devices else -1
    )


def gathered(size: int) -> Event:
    logits = GatheredTensor(
        name="['logits']", shape=(64, 512, 32000), dtype="float32", size_bytes=size
    )
    return Gathered(
        at=0,
        model=0,
        forward=0,
        step=0,
        site=1,
        output_device=0,
        size_bytes=size,
        tensors=(logits,),
    )


def memory(step: int, allocated: tuple[int, ...], peak: tuple[int, ...]) -> Event:
    return DeviceMemory(
        at=0, step=step, devices=tuple(range(len(peak))), allocated_bytes=allocated, peak_bytes=peak
    )


def dp_run(size: int, *peaks: int) -> Run:
    allocated = (2 * GB, *(GB for _ in peaks[1:]))
    events = [made(*range(len(peaks))), gathered(size)]
    events += [memory(n, allocated, peaks) for n in (1, 2, 10)]
    return gpu_run([events], *[held(0, n, g0=peaks[0], g1=GB) for n in range(3)])


def found(size: int, *peaks: int) -> list[Finding]:
    return list(DpOutputImbalance().examine(dp_run(size, *peaks)))


def test_the_output_device_is_fullest() -> None:
    (finding,) = found(4 * GB, 14 * GB, 5 * GB, 5 * GB)
    assert finding.subjects == ("cuda:0", "['logits']")
    # 12 GB move with the batch there, 4 GB on the others.
    assert finding.evidence["possible batch, factor"] == 3.0
    assert finding.evidence["process on each GPU (NVML)"] == {
        "GPU 0 H200": "14 GB",
        "GPU 1 H200": "1.0 GB",
    }


def test_balanced_devices() -> None:
    assert not found(GB, 6 * GB, 5 * GB, 5 * GB)


def test_the_loss_is_returned_and_something_else_fills_it() -> None:
    assert not found(8, 14 * GB, 5 * GB)


def test_one_device() -> None:
    run = make_run({0: [made(0)]})
    assert "fewer than two" in str(DpOutputImbalance().unobserved(run))
    assert "fewer than two" in str(DpOutputImbalance().unobserved(make_run({0: [made()]})))


def test_not_used() -> None:
    assert DpOutputImbalance().unobserved(make_run({0: []}))


def test_outputs_are_named_by_the_way_to_them() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.graph import data_parallel
    from ddpdoctor.probe.watchers.graph.data_parallel import DataParallelWrappers

    class Recorded(list[Any]):
        step = 5

        def emit(self, event: Event, *, vital: bool = False) -> None:
            self.append(event)

    recorder, known = Recorded(), data_parallel.WrapperState(0, (0, 1))
    output = {"logits": torch.zeros(8, 10), "states": (torch.zeros(8, 4), torch.zeros(8, 2))}
    for _ in range(3):  # the same again is not told again
        DataParallelWrappers.current._gathered(recorder, (known, 0), output, None)  # type: ignore[arg-type]
    (event,) = recorder
    assert [t.name for t in event.tensors] == ["['logits']", "['states'][0]", "['states'][1]"]
    assert event.size_bytes == 4 * 8 * 16
