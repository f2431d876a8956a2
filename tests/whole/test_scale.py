"""Large runs: a folder of 256 ranks and 1,000 steps is read and judged in seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import ROOT

from ddpdoctor.report.findings import Severity
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.report.registry import all_checks

sys.path.insert(0, str(ROOT / "benchmarks"))
import synthetic

MOST_SECONDS = 10
MOST_MEGABYTES = 500


def test_the_synthetic_run_is_a_clean_run(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "run", ranks=24, steps=60)
    report = open_run([tmp_path / "run"]).report(all_checks())
    assert [f for f in report.findings if f.severity is not Severity.NOTE] == []
    assert report.run.world_size == 24
    assert {(r.state, r.steps) for r in report.ranks} == {("finished", 60)}
    assert report.run.outcome == "completed"
    assert not report.coverage.lost


@pytest.mark.slow
def test_a_large_run_is_reported_in_time() -> None:
    seconds, megabytes = synthetic.measure(ranks=256, steps=1000)
    assert seconds < MOST_SECONDS
    assert megabytes < MOST_MEGABYTES
