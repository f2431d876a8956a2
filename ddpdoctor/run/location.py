"""A line of the user's code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import PurePath

import msgspec

_reader: ContextVar[str] = ContextVar("reader", default="")

_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"


class Location(msgspec.Struct, frozen=True):
    """A line of the user's code; `source` is its text, `file` what `shorten` calls it."""

    file: str
    line: int
    function: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def named(self, *calls: str) -> tuple[str, str]:
        """What the line calls the result of such a call, and its first argument: `net` and `self.g`
        of `net = DDP(self.g, [0])`; empty where it is no plain name."""
        call = "|".join(map(re.escape, calls))
        found = re.match(
            rf"\s*(?:return\s+|({_NAME})\s*=\s*)?(?:\w+\.)*(?:{call})\(\s*(.*)", self.source
        )
        given = re.match(rf"({_NAME})\s*[,)]", found[2]) if found else None
        return (found[1] or "" if found else "", given[1] if given else "")


@contextmanager
def read_in(folder: str) -> Iterator[None]:
    """Meanwhile, files that are on this machine are named as the user would type them in this
    folder."""
    token = _reader.set(folder)
    try:
        yield
    finally:
        _reader.reset(token)


def shorten(file: str, cwd: str) -> str:
    """A path as the user would type it: where the report is read (`read_in`), or else in `cwd`,
    where it ran."""
    path, reader = PurePath(file), _reader.get()
    if reader and reader != cwd and path.is_absolute() and _is_here(file):
        return str(path.relative_to(reader)) if path.is_relative_to(reader) else file
    if cwd and path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    return file


@lru_cache(maxsize=1024)
def _is_here(file: str) -> bool:
    return os.path.exists(file)
