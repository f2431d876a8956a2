"""Whole samples on a device that is not the CPU: what is found there, and that nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import (
    SAMPLES,
    Sample,
    collect,
    device_samples,
    examine,
    lacking_on_device,
    on_device,
    stopping,
)

DEVICE = str(Path(__file__).with_name("simulated_device.py"))
ALWAYS = {"drift/zero_grad_missing_clean", "drift/parameter_drift", "hang/rank_missing"}
"""The samples of every test run; the others run where `-m exhaustive` asks for them."""

_MESH = "its mesh is of the CPU, and torch does not move parameters of DTensors to this device"
_RECURRENT = "torch takes kernels for its recurrent layers that the CPU does not have"
_CPU = "it names the CPU as its device"
_LONG = "each operation takes ten times as long there"
_READS_NOTHING = "no rank reads a value, so that none waits for another, and both end"
_FUNCTIONAL = "functional collectives do not find a backend written in Python"
OTHERWISE: dict[str, str] = {
    "data/data_overlap_sharded": _MESH,
    "drift/clip_before_sync_shards": _MESH,
    "drift/hyperparameter_skew_sharded": _MESH,
    "drift/loss_scale_mismatch_valid_sharded": _MESH,
    "drift/parameter_drift_mesh": _MESH,
    "drift/unsynced_step_uneven": _FUNCTIONAL,
    "hang/collective_mismatch_full_tensor": _MESH,
    "hang/collective_shape_mismatch_clean": _FUNCTIONAL,
    "hang/rank_exited_early": _READS_NOTHING,
    "hang/rank_exited_early_tensor_parallel": _MESH,
    "hang/rank_exited_early_unwaited": _READS_NOTHING,
    "hang/rank_missing_thread": "the other rank does not read, and runs on to its end",
    "hang/stall": "without streams, the send does not wait for the receive before it",
    "hang/stall_skipped_collective": "ranks that are ahead are in the next call, which differs",
    "model/optimizer_parameter_mismatch": _RECURRENT,
    "model/optimizer_parameter_mismatch_flattened": _CPU,
    "model/optimizer_parameter_mismatch_sharded": _MESH,
    "model/parameters_changed_after_wrap": _CPU,
    "model/parameters_changed_after_wrap_toggled_clean": _LONG,
    "model/ready_twice": _CPU,
    "model/unused_parameter_gathered": _FUNCTIONAL,
    "numerics/nonfinite_origin_sharded": _MESH,
}
"""Samples that say something else there, as their clean twins do, and why."""


def on_simulated(sample: Sample) -> Sample:
    """The sample, in a program that makes the device first."""
    moved = on_device(sample, "npu:0")
    given, runner = moved.command[:-3], moved.command[-3:]
    if sample.name.startswith("hang/") and not sample.clean:
        given = stopping(given)
    return replace(sample, command=(*given, DEVICE, *runner))


def samples() -> list[Any]:
    marks = {s.name: () if s.name in ALWAYS else pytest.mark.exhaustive for s in device_samples()}
    return [pytest.param(s, id=s.name, marks=marks[s.name]) for s in device_samples()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample", samples())
def test_sample(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = OTHERWISE.get(sample.name) or OTHERWISE.get(sample.name.removesuffix("_clean"))
    if why:
        pytest.skip(why)
    hangs = sample.name.startswith("hang/") and not sample.clean
    monkeypatch.setenv("LATE_BACKEND_PATIENCE_S", "0.5" if hangs else "5")
    report = examine(on_simulated(sample), tmp_path)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert lacking_on_device(sample, report) == []


def test_the_table_names_samples() -> None:
    names = {s.name for s in collect()}
    assert set(OTHERWISE) <= names and names >= ALWAYS
    assert (SAMPLES / "_on_device.py").exists()
