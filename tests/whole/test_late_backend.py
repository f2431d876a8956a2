"""Samples on a backend whose hosts run ahead of their devices: the same verdicts as on gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import Sample, collect, differences, examine, stopping

BACKEND = str(Path(__file__).with_name("late_backend.py"))
ALWAYS = {"hang/rank_missing", "hang/rank_exited_early", "hang/collective_mismatch"}
"""The samples of every test run; the others run where `-m exhaustive` asks for them."""

UNNUMBERED = (
    "model/ddp_bypassed_adversary_clean", "model/static_graph_broken_clean", "model/mode_skew",
    "numerics/checkpoint_race_clean", "numerics/checkpoint_before_sync_clean",
    "drift/clip_before_sync", "drift/parameter_drift_masters",
)  # fmt: skip

_FUNCTIONAL = "functional collectives do not find a backend written in Python"
OTHERWISE: dict[str, str] = {
    "data/data_overlap_sharded": _FUNCTIONAL,
    "data/data_overlap_sharded_clean": _FUNCTIONAL,
    "drift/hyperparameter_skew_sharded": _FUNCTIONAL,
    "drift/hyperparameter_skew_sharded_clean": _FUNCTIONAL,
    "drift/loss_scale_mismatch_valid_sharded": _FUNCTIONAL,
    "drift/loss_scale_mismatch_valid_sharded_clean": _FUNCTIONAL,
    "model/optimizer_parameter_mismatch_flattened": _FUNCTIONAL,
    "model/optimizer_parameter_mismatch_flattened_clean": _FUNCTIONAL,
    "model/optimizer_parameter_mismatch_sharded": _FUNCTIONAL,
    "model/optimizer_parameter_mismatch_sharded_clean": _FUNCTIONAL,
    "numerics/nonfinite_origin_sharded": _FUNCTIONAL,
    "hang/collective_shape_mismatch_clean": _FUNCTIONAL,
    "hang/collective_mismatch_full_tensor": _FUNCTIONAL,
    "hang/rank_exited_early_unwaited": "no rank reads a value, so that none waits for another",
    "hang/stall": "without streams, the send does not wait for the receive before it",
    "drift/gradient_drift_in_a_hook": "the probe calls no `tolist` that a program replaced",
    "model/unused_parameter_gathered_clean": _FUNCTIONAL,
}
"""Samples that say something else there, and why."""


def samples() -> list[Any]:
    fit = [
        s for s in collect()
        if s.command[0] != "exec" and not s.gpus and "_own" not in s.name
        and not s.name.startswith("launch/")  # these are about the line that makes the group
        and '"gloo"' in s.path.read_text() and "spawn" not in s.path.read_text()
    ]  # fmt: skip
    marks = {s.name: () if s.name in ALWAYS else pytest.mark.exhaustive for s in fit}
    return [pytest.param(s, id=s.name, marks=marks[s.name]) for s in fit]


@pytest.mark.timeout(130)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", UNNUMBERED)
def test_a_backend_that_does_not_count_its_collectives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be known is not taken for a backward that does not communicate."""
    monkeypatch.setenv("LATE_BACKEND_UNNUMBERED", "1")
    (sample,) = (s for s in collect() if s.name == name)
    report = examine(replace(sample, command=(*sample.command, BACKEND)), tmp_path)
    assert differences(sample, report) == []


@pytest.mark.timeout(130)
@pytest.mark.parametrize("sample", samples())
def test_sample(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sample.name in OTHERWISE:
        pytest.skip(OTHERWISE[sample.name])
    hangs = sample.name.startswith("hang/") and not sample.clean
    monkeypatch.setenv("LATE_BACKEND_PATIENCE_S", "0.5" if hangs else "5")
    given = (*sample.command, BACKEND)
    if sample.name.startswith("hang/") and not sample.clean:
        given = stopping(given)
    report = examine(replace(sample, command=given), tmp_path)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert differences(sample, report) == []
