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
from datetime import timedelta
from pathlib import Path
from typing import Any

from .._version import __version__
from ..storage.run_folder import RunFolder
from .desk import Desk, Standing
from .link import STORE_S, Link, Store

GATHER_S, AT_THE_END_S = 10.0, 2.0
"""How long it waits for all nodes to come, to know how many there are; and where this one ends."""


class RankMeeting:
    """`start` begins a thread, which ends at once where this is not the first rank of its node or
    where there is no other node; else it gives the node a number and starts its `Link`. `close`
    hands over the last records.

    Args:
        rank: this one; world: how many there are on all nodes.
        come_s: records of other ranks of this node may still begin for so long.
    """

    def __init__(
        self, store: Store, folder: Path, *, rank: int, world: int, attempt: int, come_s: float
    ) -> None:
        self._store, self._folder = store, folder
        self._rank, self._world, self._attempt, self._come_s = rank, world, attempt, come_s
        self._link: Link | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """`failed`: see `Link.close`."""
        self._closed.set()
        self._thread.join(STORE_S)
        if self._link is not None:
            self._link.close(None, failed=failed)

    def _run(self) -> None:
        here = self._ranks_here()
        if self._rank != min(here, default=-1) or len(here) >= self._world:
            return
        desk, began = Desk(self._folder), time.monotonic()
        desk.write_standing(Standing(nodes=2, by_rank=True, began=began))
        try:
            node, nodes = self._number(here)
        except Exception as error:  # of the store: its types differ between versions of torch
            why = " ".join(str(error).split())[:200] or type(error).__name__
            desk.write_standing(Standing(nodes=2, why=why, by_rank=True))
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
            lead=_host(self._store),
        )
        self._link.start()

    def _ranks_here(self) -> set[int]:
        """The ranks of this node."""
        deadline = time.monotonic() + self._come_s
        while True:
            files = RunFolder(self._folder).rank_files(self._attempt)
            here = {rank for rank, _ in files}
            waits = len(here) < self._world and time.monotonic() < deadline
            if not waits or self._closed.wait(0.1):
                return here

    def _number(self, here: set[int]) -> tuple[int, int]:
        """This node's number, and how many nodes there are."""
        store = self._store.clone()
        with contextlib.suppress(AttributeError):
            store.set_timeout(timedelta(seconds=STORE_S))
        prefix = f"ddpdoctor/{self._attempt}/"
        node = 0 if 0 in here else store.add(f"{prefix}nodes", 1)
        came = store.add(f"{prefix}ranks", len(here))
        deadline = time.monotonic() + GATHER_S
        while came < self._world and time.monotonic() < deadline:
            if self._closed.wait(0.1):  # it ends: the others may end as well, a little later
                deadline = min(deadline, time.monotonic() + AT_THE_END_S)
                time.sleep(0.1)
            came = store.add(f"{prefix}ranks", 0)
        return node, store.add(f"{prefix}nodes", 0) + 1


def _host(store: Any) -> str:
    """The host of a store, empty where it has none."""
    while inner := getattr(store, "underlying_store", None):
        store = inner
    return str(getattr(store, "host", ""))
