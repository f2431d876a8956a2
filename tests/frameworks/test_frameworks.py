"""Frameworks for real: what is right is left alone, what was planted is found."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from sampling import Sample, differences, examine, read

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


def needs(path: Path) -> str | None:
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    found = [line.partition(":")[2].strip() for line in text.splitlines() if "needs:" in line]
    return found[0] if found else None


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_framework(path: Path, tmp_path: Path) -> None:
    if (package := needs(path)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make frameworks)")
    sample: Sample = read(path)
    report = examine(sample, tmp_path, limit_s=300)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert report.coverage.examined
    assert any(rank.steps for rank in report.ranks), "no optimizer step was seen"
    assert differences(sample, report) == []
