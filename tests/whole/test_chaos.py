"""A short run of the chaos test (`make chaos` is the long one): two of its faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import FAULTS, Score, Trial, attempt, judge


@pytest.mark.slow
@pytest.mark.timeout(130)
@pytest.mark.parametrize("fault", ["kill", "skip"])
def test_a_random_fault_is_named(fault: str, tmp_path: Path) -> None:
    seed = 7 * len(FAULTS) + list(FAULTS).index(fault)
    trial = Trial.draw(seed)
    assert trial.fault == fault
    found, seconds = attempt(trial, tmp_path)
    score = Score()
    judge(trial, found, score, seconds)
    assert score.misses == []
    assert (score.kind, score.rank, score.alarms) == (1, 1, 0)
