"""Frameworks for real: what is right is left alone, what was planted is found."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest
from sampling import Sample, differences, launched, read

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


def said(path: Path, key: str) -> str | None:
    """What stands in the docstring after `key:`."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    lines = [line.partition(":") for line in text.splitlines()]
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def is_there(needed: str) -> bool:
    """Whether a package, or a program, is installed."""
    return importlib.util.find_spec(needed) is not None or shutil.which(needed) is not None


@pytest.mark.frameworks
@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_framework(path: Path, tmp_path: Path) -> None:
    if (needed := said(path, "needs")) and not is_there(needed):
        pytest.skip(f"{needed} is not installed (make frameworks)")
    sample: Sample = read(path)
    status, report = launched(sample, tmp_path, limit_s=300)
    assert status == int(said(path, "status") or 0)
    assert not [f.summary for f in report.findings if f.code == "DDP001"]
    assert report.coverage.examined
    assert any(rank.steps for rank in report.ranks), "no optimizer step was seen"
    assert differences(sample, report) == []
