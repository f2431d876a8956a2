"""Clean samples whose values cannot be read at once, as those on a device: nothing is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import Sample, collect, examine

from ddpdoctor.report.findings import Severity

RUNNER = str(Path(__file__).with_name("opaque_values.py"))
ALWAYS = {"drift/zero_grad_missing_clean"}
"""The samples of every test run; the others run where `-m exhaustive` asks for them."""


def samples() -> list[Any]:
    fit = [
        s for s in collect()
        if s.clean and s.command[0] != "exec" and not s.gpus and not s.name.startswith("launch/")
        and "spawn" not in s.path.read_text()
    ]  # fmt: skip
    marks = {s.name: () if s.name in ALWAYS else pytest.mark.exhaustive for s in fit}
    return [pytest.param(s, id=s.name, marks=marks[s.name]) for s in fit]


@pytest.mark.timeout(130)
@pytest.mark.parametrize("sample", samples())
def test_sample(sample: Sample, tmp_path: Path) -> None:
    report = examine(replace(sample, command=(*sample.command, RUNNER)), tmp_path)
    found = [f for f in report.findings if f.severity is not Severity.NOTE or f.code == "DDP001"]
    assert not [f"{f.code} {f.summary} ({f.location})" for f in found]
