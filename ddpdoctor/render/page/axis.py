"""Where the marks of an axis stand."""

from __future__ import annotations

import math
from collections.abc import Iterator

ROUND = (1, 2, 5, 10)


def round_marks(begin: float, end: float, most: int) -> Iterator[tuple[float, str]]:
    """Round numbers from `begin` to `end`, `most` at most, with as many decimals as they need."""
    long = end - begin
    if not (math.isfinite(long) and long > 0 and math.isfinite(begin)):
        return
    power = 10.0 ** math.floor(math.log10(long / most))
    each = power * next(r for r in ROUND if long / (power * r) <= most)
    decimals = max(0, -math.floor(math.log10(each) + 1e-9))
    first = math.ceil(begin / each - 1e-9)
    for n in range(most + 1):
        at = (first + n) * each
        if at > end + 1e-9 * long:
            return
        yield at, f"{at:.{decimals}f}"
