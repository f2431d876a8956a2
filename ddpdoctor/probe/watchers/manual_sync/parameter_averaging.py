"""Do parameters change when they are exchanged between steps?

Local SGD writes averages back to them. A program that only compares its replicas exchanges as much
and writes nothing, so digests from before and after the exchange are compared.
"""

from __future__ import annotations

from collections.abc import Callable

from ...tensors.limits import ENOUGH_PASSED
from ...tensors.pending_digests import Arrivals, Waiting
from .exchanges import Exchanges

Digest = Callable[[], "Waiting | None"]


class WriteBack:
    """Digests of the parameters of one model in one optimizer, around exchanges of that size.

    Attributes:
        unchanged: exchanges as large as the parameters that left them unchanged.
    """

    def __init__(self) -> None:
        self.unchanged = 0
        self._window = -1
        self._before: Waiting | None = None
        self._pairs: Arrivals[None] = Arrivals()

    def called(self, digest: Digest, size: int) -> None:
        """Digest the parameters, if a collective that is about to be made may exchange them.

        This is done once per window, before half of an exchange of that size (`ENOUGH_PASSED / 2`)
        has taken place: then some parameters still have their old values, in whatever order the
        program writes them.

        Args:
            digest: digests the parameters.
            size: their number of elements.
        """
        window, elements = Exchanges.current.window_elements()
        if window != self._window and elements >= ENOUGH_PASSED / 2 * size:
            self._window, self._before = window, digest()

    def exchanged(self, digest: Digest) -> bool:
        """Digest the parameters before a step that follows an exchange of their size.

        Returns True if they were not digested before the exchange, and so may have changed.
        """
        before, self._before = self._before, None
        if before is None or self._window != Exchanges.current.window_elements()[0]:
            return True
        if (now := digest()) is None:
            return True
        self._pairs.add(None, before, now)
        return False

    def changed(self, *, wait: bool = False) -> bool:
        """Whether any exchange changed the parameters, by the digests that have arrived."""
        changed = [before != now for _, (before, now) in self._pairs.take(wait=wait)]
        self.unchanged += changed.count(False)
        return any(changed)
