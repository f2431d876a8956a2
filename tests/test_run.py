"""What a run says of itself, from literal records."""

from __future__ import annotations

import pytest
from recordings import make_run

from ddpdoctor.events import StepDone


def test_steps_that_were_joined_count_each() -> None:
    joined = StepDone(at=0, optimizer=0, step=59, site=-1, wall_s=1.0, count=50)
    run = make_run({0: [joined] * 5})
    assert run.ranks[0].step_time() == pytest.approx(0.02)
