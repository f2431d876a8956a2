"""A line of the user's code."""

from __future__ import annotations

import re
from pathlib import PurePath

import msgspec

_NAME = r"[A-Za-z_]\w*(?:\.\w+)*"


class Location(msgspec.Struct, frozen=True):
    """A line of the user's code; `source` is its text, `file` relative to the run's folder."""

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


def shorten(file: str, cwd: str) -> str:
    """A path as the user would type it in `cwd`."""
    path = PurePath(file)
    if cwd and path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    return file
