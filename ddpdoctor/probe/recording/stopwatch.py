"""Time that one module of the probe adds up and another one reads, without importing it."""

from __future__ import annotations


class Stopwatch:
    """Adds up nanoseconds until they are read."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        spent, self.ns = self.ns, 0
        return spent / 1e9


loading = Stopwatch()
"""Time that the program waited for batches; added by the loaders' watcher, read at each step."""

loading_while_busy = Stopwatch()
"""What of it passed while the device still worked on what it was given before."""
