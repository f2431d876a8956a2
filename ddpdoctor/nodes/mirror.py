"""Copies of a node's records on another node: what has changed since the last look, and where it is
kept there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..storage.flight_dumps import PREFIX
from ..storage.run_folder import CLOCK, write_private
from .messages import Piece

AT_ONCE = 4 << 20
"""Bytes of one look at a folder; the rest comes with the next ones."""

BLOCK = 512
"""Rings are overwritten in place: blocks of this size that differ are sent."""

LARGEST_FILE, LARGEST_NODE = 64 << 20, 4 << 30
"""What is taken of one file, and of one node."""

_GROWS = (
    r"(?:rank-\d{1,7}(?:\.pid-\d{1,9})?\.(?:jsonl|log|stacks\.txt)|node-\d{1,7}\.jsonl"
    rf"|{PREFIX}\d{{1,7}})"
)
_RING = r"rank-\d{1,7}(?:\.pid-\d{1,9})?\.ring"
_NAME = re.compile(rf"(?:restart-\d{{1,4}}/)?(?:(?P<grows>{_GROWS})|(?P<ring>{_RING})|run\.json)")


class Outbox:
    """What to send of a run folder.

    Args:
        sent: how much of files that grow was sent before.
    """

    def __init__(self, folder: Path, sent: Mapping[str, int] | None = None) -> None:
        self._folder = folder
        self._sent = dict(sent or {})
        self._copies: dict[str, bytes] = {}

    def pieces(self) -> list[Piece]:
        """What has changed since the last call, up to `AT_ONCE` bytes."""
        found: list[Piece] = []
        left = AT_ONCE
        for name, path, match in _files(self._folder):
            for piece in self._changed(name, path, match, left):
                found.append(piece)
                left -= len(piece.data)
            if left <= 0:
                break
        return found

    def _changed(self, name: str, path: Path, match: re.Match[str], left: int) -> Iterator[Piece]:
        grows = bool(match["grows"])
        begin = self._sent.get(name, 0) if grows else 0
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                file.seek(begin)
                data = file.read(min(left, LARGEST_FILE - begin))
        except OSError:
            return
        if grows:
            if data:
                self._sent[name] = begin + len(data)
                yield Piece(name, begin, data)
            return
        before, self._copies[name] = self._copies.get(name, b""), data
        if not match["ring"]:
            if data != before:
                yield Piece(name, -1, data)
            return
        for at in range(0, len(data), BLOCK):
            if data[at : at + BLOCK] != before[at : at + BLOCK]:
                yield Piece(name, at, data[at : at + BLOCK])


class Inbox:
    """A folder with the records of another node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = LARGEST_NODE

    def set_clock(self, ahead_s: float) -> None:
        """Write down by how much the node's wall clock is ahead of ours.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._folder / CLOCK, str(ahead_s).encode())

    def sizes(self) -> dict[str, int]:
        """How much is here of files that grow, by name."""
        return {n: path.stat().st_size for n, path, match in _files(self._folder) if match["grows"]}

    def take(self, pieces: Iterable[Piece], *, late: bool = False) -> None:
        """Write what came; pieces of files that are none of ours are dropped.

        Args:
            late: newer pieces were taken before; of files that do not grow these are old.

        Raises:
            OSError: the folder cannot be written.
        """
        for piece in pieces:
            match = _NAME.fullmatch(piece.name)
            if (
                match is None
                or (late and not match["grows"])
                or piece.offset + len(piece.data) > LARGEST_FILE
            ):
                continue
            self._left -= len(piece.data)
            if self._left >= 0:
                self._write(self._folder / piece.name, piece)

    def _write(self, path: Path, piece: Piece) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags | (os.O_TRUNC if piece.offset < 0 else 0), 0o600)
        try:
            os.pwrite(fd, piece.data, max(0, piece.offset))
        finally:
            os.close(fd)


def _files(folder: Path) -> Iterator[tuple[str, Path, re.Match[str]]]:
    # Rings last: what they say is never older than the events.
    names = [*_names(folder)]
    for inside in [n for n in names if re.fullmatch(r"restart-\d{1,4}", n)]:
        names += [f"{inside}/{n}" for n in _names(folder / inside)]
    known = [(n, match) for n in names if (match := _NAME.fullmatch(n))]
    for name, match in sorted(known, key=lambda k: (bool(k[1]["ring"]), k[0])):
        yield name, folder / name, match


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
