"""Before any rank is there: torchrun waits for the other nodes, and says nothing of it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .torchrun import TorchrunArgs, nodes, said

LATE_S = 30.0
"""Where the user did not say: as long as ranks may stand still before their first step."""
MOST_S = 60.0
"""The line comes after that at the latest: whoever sits before a silent terminal wants to know."""
_PORT = "29500"


class Gathering:
    """Call `look` until ranks have started.

    Args:
        hang_after: as the user said, None where that was left to us.
        gives_up_s: how long it may take at most; None for as long as torchrun waits.
    """

    def __init__(
        self,
        args: TorchrunArgs,
        environ: Mapping[str, str],
        hang_after: float | None,
        gives_up_s: float | None = None,
    ) -> None:
        self._count = (said(args, environ, "nnodes") or "1").replace(":", " to ")
        self._place = _place(args, environ)
        self._over = nodes(args, environ) < 2
        self._began = time.monotonic()
        self._late = min(MOST_S, LATE_S if hang_after is None else hang_after)
        self._gives_up = gives_up_s
        self._told = False

    def look(self, begun: bool) -> tuple[str, str]:
        """A line for the user, and why the run must be stopped; empty for none."""
        self._over = self._over or begun
        if self._over:
            return "", ""
        waited = time.monotonic() - self._began
        line = ""
        if waited > self._late and not self._told:
            self._told = True
            line = f"waiting for the other nodes at {self._place}, 1 of {self._count} here"
        if self._gives_up is None or waited <= self._gives_up:
            return line, ""
        self._over = True
        return line, (
            f"the other nodes did not come to {self._place} within {self._gives_up:.0f} s, or this "
            f"one could not reach it; 1 of {self._count} here"
        )


def _place(args: TorchrunArgs, environ: Mapping[str, str]) -> str:
    """Where torchrun of all nodes meet."""
    if endpoint := said(args, environ, "rdzv-endpoint"):
        return endpoint
    address = said(args, environ, "master-addr") or "127.0.0.1"
    return f"{address}:{said(args, environ, 'master-port') or _PORT}"
