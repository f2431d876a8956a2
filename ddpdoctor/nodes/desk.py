"""The files of a run folder by which the process that can reach the other nodes, the launcher's or
a rank's, and the monitor's, which judges, agree.

    nodes/link.json    how the launcher's process stands with the other nodes
    nodes/orders.json  what the first node says to the others, also on these
    nodes/settled      the monitor has written all that it knows of the ranks of this node
    nodes/<N>/         records of node N, on the first node
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from ..events import RankExiting
from ..storage.run_folder import NODES, RunFolder, write_private
from .messages import Orders

S = TypeVar("S", bound=msgspec.Struct)

LAST_BYTES = 4096
"""Of a rank's record, in which its last event is looked for."""

ALONE, LEADS, FOLLOWS, SHARES = "alone", "leads", "follows", "shares"


class Heard(msgspec.Struct):
    """Another node, as the first one knows it.

    Attributes:
        at: when it was heard of last, on the monotonic clock; over: nothing more will come.
        ahead_s: by how much its wall clock is ahead of ours.
        version: its ddpdoctor's, where that writes messages that this one cannot read.
    """

    host: str
    at: float
    over: bool = False
    ahead_s: float = 0.0
    version: str = ""


class Standing(msgspec.Struct):
    """How this node stands with the others.

    Attributes:
        role: `LEADS` (this is the first node), `FOLLOWS`, `SHARES` (the first node reads this very
            folder), or `ALONE` (the others are not known, or cannot be reached: `why`).
        node: this node's number; nodes: how many there are.
        heard: the other nodes, on the first one.
        at: when the first node was heard of last, on the others.
        beat_s: every node is heard of at least that often.
        status: torchrun's, once it has ended; -1 before. complete: all records are here.
        by_rank: a rank of this node meets the others, and no longer does once it has ended.
        lead: the host of the store in which it does. began: when it began to, on the monotonic
            clock.
    """

    role: str = ALONE
    node: int = 0
    nodes: int = 1
    why: str = ""
    heard: dict[int, Heard] = {}
    at: float = 0.0
    beat_s: float = 2.0
    status: int = -1
    complete: bool = False
    by_rank: bool = False
    lead: str = ""
    began: float = 0.0

    @property
    def meets(self) -> bool:
        """Whether a rank of this node has begun to meet the others, and not all are there."""
        leads = self.role == LEADS and len(self.heard) >= self.nodes - 1
        follows = self.role == FOLLOWS and self.at > 0
        return self.by_rank and not (leads or follows)


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NODES
        self._standing = self.path / "link.json"
        self._orders = self.path / "orders.json"
        self._settled = self.path / "settled"
        self._token = self.path / "token"

    def write_standing(self, standing: Standing) -> None:
        self._write(self._standing, msgspec.json.encode(standing))

    def standing(self) -> Standing | None:
        return _read(self._standing, Standing)

    def write_orders(self, orders: Orders) -> None:
        self._write(self._orders, msgspec.json.encode(orders))

    def orders(self) -> Orders | None:
        return _read(self._orders, Orders)

    def orders_changed(self) -> float:
        """When the orders were written last; 0 for never."""
        try:
            return self._orders.stat().st_mtime
        except OSError:
            return 0.0

    def settle(self) -> None:
        self._write(self._settled, b"")

    def settled(self) -> bool:
        return self._settled.exists()

    def ranks_have_ended(self) -> bool:
        """Whether each rank of this node has written its last event, or left no record."""
        folder = RunFolder(self.folder)
        files = (path for _, path in folder.rank_files(folder.attempts()[-1]))
        return all(map(_has_ended, files))

    def mark(self, token: str) -> None:
        """Leave a mark by which another node knows this folder."""
        self._write(self._token, token.encode())

    def mark_here(self) -> str:
        """The mark in this folder, empty for none."""
        try:
            return self._token.read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def marked(self, token: str) -> bool:
        return self.mark_here() == token

    def node_folder(self, number: int) -> Path:
        return self.path / str(number)

    def _write(self, path: Path, content: bytes) -> None:
        with contextlib.suppress(OSError):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            write_private(path, content)


def _has_ended(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            return f'"event":"{RankExiting.__struct_config__.tag}"'.encode() in file.read()
    except OSError:
        return True


def _read(path: Path, kind: type[S]) -> S | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
