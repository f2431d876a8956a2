"""Every sample, through the real command: the faulty ones are found, the clean ones are left alone.

All checks look at every sample, so that each new sample tests the checks that were there before.
Of each check one fault is in every test run, and every fourth of the clean twins of errors. The
others run where `-m exhaustive` asks for them (make samples): those that show the same fault in
other clothes, and the other clean twins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sampling import Sample, SampleError, collect, differences, examine, read

from ddpdoctor.launch.devices import visible_gpus
from ddpdoctor.report import registry
from ddpdoctor.report.findings import Severity

NAMES = {check.name.replace("-", "_") for check in registry.all_checks()}
CLEAN_TWINS = 4
"""One in so many of the clean twins of errors is in every test run."""


def samples() -> list[Any]:
    every = {s.name: s for s in collect()}
    faults = [n for n, s in every.items() if s.path.stem in NAMES]
    errors = [n for n in faults if any(e.severity is Severity.ERROR for e in every[n].expected)]
    chosen = {*faults, *(f"{n}_clean" for n in sorted(errors)[::CLEAN_TWINS])}
    return [
        pytest.param(s, id=n, marks=() if n in chosen else pytest.mark.exhaustive)
        for n, s in every.items()
    ]


@pytest.mark.timeout(130)
@pytest.mark.parametrize("sample", samples())
def test_sample(sample: Sample, tmp_path: Path) -> None:
    if sample.gpus > visible_gpus():
        pytest.skip(f"needs {sample.gpus} GPUs")
    report = examine(sample, tmp_path)
    broken = [f.summary for f in report.findings if f.code == "DDP001"]
    assert not broken
    assert differences(sample, report) == []


def test_what_a_sample_says_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Text.\n\nrun: -m x\nfinds: DDP301 error at `a = b`\nfinds: DDP603 note\n"""'
    )
    first, second = read(path).expected
    assert (first.code, first.severity, first.source) == ("DDP301", Severity.ERROR, "a = b")
    assert (second.code, second.severity, second.source) == ("DDP603", Severity.NOTE, None)


@pytest.mark.parametrize(
    "text", ["", "run: x", "run: x\nfinds: DDP301", "run: x\nrun: y\nfinds: nothing"]
)
def test_a_sample_that_does_not_say_what_to_expect_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sample.py"
    path.write_text(f'"""{text}"""')
    with pytest.raises(SampleError):
        read(path)
