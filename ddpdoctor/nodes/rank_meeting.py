"""Meets the other nodes from inside a rank: in the store of `init_process_group`, where the ranks
were started by another launcher than the doctor's torchrun.

Keys, below `ddpdoctor/<attempt>/`:

    nodes   how many nodes have come besides that of rank 0, which leads
    ranks   how many ranks all nodes have together
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from .._version import __version__
from .desk import Desk, Standing
from .link import STORE_S, Link, Store

GATHER_S = 10.0
"""How long it waits for all nodes to come, to know how many there are."""


class RankMeeting:
    """`start` begins a thread, which gives the node a number and starts its `Link`; `close` hands
    over the last records.

    Args:
        here: the ranks of this node; world: how many there are on all nodes.
    """

    def __init__(
        self, store: Store, folder: Path, *, here: Sequence[int], world: int, attempt: int
    ) -> None:
        self._store, self._folder = store, folder
        self._here, self._world, self._attempt = here, world, attempt
        self._link: Link | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(STORE_S)
        if self._link is not None:
            self._link.close(None)

    def _run(self) -> None:
        try:
            node, nodes = self._number()
        except Exception as error:  # of the store: its types differ between versions of torch
            why = " ".join(str(error).split())[:200] or type(error).__name__
            Desk(self._folder).write_standing(Standing(nodes=2, why=why, by_rank=True))
            return
        self._link = Link(
            self._store,
            self._folder,
            node=node,
            nodes=nodes,
            attempt=self._attempt,
            places={},
            origin=secrets.token_hex(8),
            host=platform.node(),
            version=__version__,
            by_rank=True,
        )
        self._link.start()

    def _number(self) -> tuple[int, int]:
        """This node's number, and how many nodes there are."""
        store = self._store.clone()
        with contextlib.suppress(AttributeError):
            store.set_timeout(timedelta(seconds=STORE_S))
        prefix = f"ddpdoctor/{self._attempt}/"
        node = 0 if 0 in self._here else store.add(f"{prefix}nodes", 1)
        came = store.add(f"{prefix}ranks", len(self._here))
        deadline = time.monotonic() + GATHER_S
        while came < self._world and time.monotonic() < deadline and not self._closed.wait(0.1):
            came = store.add(f"{prefix}ranks", 0)
        return node, store.add(f"{prefix}nodes", 0) + 1
