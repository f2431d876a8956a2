"""What ranks that should do the same recorded differently, for every kind of event."""

from __future__ import annotations

from .compared import COMPARED, LOAD_ALL, NOT_COMPARED, ONLY_SOME, Compared, Recorded
from .differences import Difference, differences, differences_among, preceding
from .records import Series, extra_by_line, same_value, series

__all__ = [
    "COMPARED", "LOAD_ALL", "NOT_COMPARED", "ONLY_SOME", "Compared", "Difference", "Recorded",
    "Series", "differences", "differences_among", "extra_by_line", "preceding", "same_value",
    "series",
]  # fmt: skip
