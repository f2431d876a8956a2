"""The marks of an axis."""

from __future__ import annotations

import pytest

from ddpdoctor.render.page.axis import round_marks


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (0.0, 1.55, ["0.0", "0.5", "1.0", "1.5"]),
        (0.0, 10.3, ["0", "2", "4", "6", "8", "10"]),
        (5.04, 5.44, ["5.1", "5.2", "5.3", "5.4"]),
        (0.0, 0.0031, ["0.000", "0.001", "0.002", "0.003"]),
        (0.0, 7200.0, ["0", "2000", "4000", "6000"]),
        (-0.1, 0.1, ["-0.10", "-0.05", "0.00", "0.05", "0.10"]),
    ],
)
def test_round_numbers_as_exact_as_needed(begin: float, end: float, said: list[str]) -> None:
    marks = list(round_marks(begin, end, 6))
    assert [text for _, text in marks] == said
    assert all(begin - 1e-9 <= at <= end + 1e-9 for at, _ in marks)


@pytest.mark.parametrize("end", [0.0, -1.0, float("nan"), float("inf"), 1e-320])
def test_no_axis_without_a_length(end: float) -> None:
    assert len(list(round_marks(0.0, end, 6))) <= 7
    assert list(round_marks(float("nan"), end, 6)) == []
