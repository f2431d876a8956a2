"""Whether copies that differ come further apart, as the report prints their distances."""

import pytest

from ddpdoctor.analysis.replicas.causes import _grows


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([0.0073, 0.0074, 0.0081, 0.0092], "slowly"),
        ([0.27, 0.33, 0.4], "slowly"),
        ([0.1, 0.2], "yes"),
        ([0.1, 0.11], "no"),
        ([0.11, 0.1], "no"),
        ([0.4, 0.3], "shrinks slowly"),
        ([0.2, 0.1], "shrinks"),
        ([0.1], "measured once"),
    ],
)
def test_grows(sizes: list[float], told: str) -> None:
    assert _grows(sizes) == told
