"""Whether parameters become others by what is exchanged between steps.

Local SGD writes averages back to them. A program that only checks its replicas exchanges as much,
and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ...tensors.collective_payload import ENOUGH
from ...tensors.pending_digests import Waiting
from . import exchanges

Digest = Callable[[], "Waiting | None"]


class WriteBack:
    """Of the parameters that one optimizer holds of one model.

    Attributes:
        unchanged: exchanges of as much as the parameters that left them as they were.
    """

    def __init__(self) -> None:
        self.unchanged = 0
        self._window = -1
        self._before: Waiting | None = None
        self._pairs: list[tuple[Waiting, Waiting]] = []

    def called(self, digest: Digest, size: int) -> None:
        """A collective is about to be made. Parameters are digested once in a window, before half
        of what an exchange of them takes is under way: some are as they were then, whatever the
        order in which they are written."""
        window, elements = exchanges.between()
        if window != self._window and elements >= ENOUGH / 2 * size:
            self._window, self._before = window, digest()

    def exchanged(self, digest: Digest) -> bool:
        """Before a step, after an exchange of as much as the parameters. Whether nothing is known
        of how they were before it: they may well have been written to."""
        before, self._before = self._before, None
        if before is None or self._window != exchanges.between()[0]:
            return True
        if (now := digest()) is None:
            return True
        self._pairs.append((before, now))
        return False

    def changed(self, *, wait: bool = False) -> bool:
        """Whether any of them became another one, as far as the devices have answered."""
        there = [p for p in self._pairs if all([one.ready(wait=wait) for one in p])]
        self._pairs = [p for p in self._pairs if p not in there]
        changed = [before.values != now.values for before, now in there]
        self.unchanged += changed.count(False)
        return any(changed)
