"""Time that adds up on one floor of the probe and is asked for on another."""

from __future__ import annotations


class Stopwatch:
    """Nanoseconds since somebody last asked."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        spent, self.ns = self.ns, 0
        return spent / 1e9


loading = Stopwatch()
"""Spent waiting for batches."""
