"""Tells the user that torchrun waits for other nodes, which torchrun itself does not say."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .torchrun import TorchrunArgs, nodes, said

LATE_S = 30.0
"""The default of `--hang-after` before training begins."""
MOST_S = 60.0
"""The message comes after this time at the latest, however long `--hang-after` is."""
_PORT = "29500"


class Gathering:
    """The wait for other nodes; call `look` repeatedly until ranks have started.

    Args:
        hang_after: the option of that name, None for `auto`.
        gives_up_s: how long the wait may take at most; None for as long as torchrun waits.
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
        """A message for the user, and why the run must be stopped; each empty if there is none.

        Args:
            begun: whether ranks have started.
        """
        self._over = self._over or begun
        if self._over:
            return "", ""
        waited = time.monotonic() - self._began
        line = ""
        if waited > self._late and not self._told:
            self._told = True
            line = (
                f"waiting for other nodes at {self._place}; only this one of {self._count} is here"
            )
        if self._gives_up is None or waited <= self._gives_up:
            return line, ""
        self._over = True
        return line, (
            f"the other nodes did not reach {self._place} within {self._gives_up:.0f} s, or this "
            f"one cannot; only this one of {self._count} is here"
        )


def _place(args: TorchrunArgs, environ: Mapping[str, str]) -> str:
    """The rendezvous address of torchrun."""
    if endpoint := said(args, environ, "rdzv-endpoint"):
        return endpoint
    address = said(args, environ, "master-addr") or "127.0.0.1"
    return f"{address}:{said(args, environ, 'master-port') or _PORT}"
