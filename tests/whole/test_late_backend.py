"""Samples on a backend whose hosts run ahead of their devices: the same verdicts as on gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import Sample, collect, differences, examine

BACKEND = str(Path(__file__).with_name("late_backend.py"))
ALWAYS = {"hang/rank_missing", "hang/rank_exited_early", "hang/collective_mismatch"}
"""The samples of every test run; the others run where `-m exhaustive` asks for them."""

OTHERWISE: dict[str, str] = {}
"""Samples that say something else there, and why."""


def samples() -> list[Any]:
    fit = [
        s for s in collect()
        if s.command[0] != "exec" and not s.gpus and "_own" not in s.name
        and '"gloo"' in s.path.read_text() and "spawn" not in s.path.read_text()
    ]  # fmt: skip
    marks = {s.name: () if s.name in ALWAYS else pytest.mark.exhaustive for s in fit}
    return [pytest.param(s, id=s.name, marks=marks[s.name]) for s in fit]


@pytest.mark.timeout(130)
@pytest.mark.parametrize("sample", samples())
def test_sample(sample: Sample, tmp_path: Path) -> None:
    if sample.name in OTHERWISE:
        pytest.skip(OTHERWISE[sample.name])
    given = (*sample.command, BACKEND)
    report = examine(replace(sample, command=given), tmp_path)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert differences(sample, report) == []
