"""DDP202 over literal events."""

from __future__ import annotations

from ddpdoctor.checks.memory.dp_instead_of_ddp import DpInsteadOfDdp
from gpus import gpu_run
from recordings import make_run

from ddpdoctor.events import DataParallelMade, Event
from ddpdoctor.report.findings import Severity


def made(*devices: int) -> Event:
    return DataParallelMade(
        at=0,
        model=0,
        kind="Net",
        site=1,
        devices=devices,
        output_device=devices[0] if devices else -1,
    )


def test_several_devices() -> None:
    (finding,) = DpInsteadOfDdp().examine(gpu_run([[made(0, 1, 2)]]))
    assert finding.severity is Severity.NOTE


def test_one_device_or_none() -> None:
    assert not list(DpInsteadOfDdp().examine(gpu_run([[made(0)]])))
    assert not list(DpInsteadOfDdp().examine(gpu_run([[made()]])))


def test_inference_only() -> None:
    assert not list(DpInsteadOfDdp().examine(make_run({0: [made(0, 1)]})))


def test_not_used() -> None:
    assert DpInsteadOfDdp().unobserved(make_run({0: []}))
