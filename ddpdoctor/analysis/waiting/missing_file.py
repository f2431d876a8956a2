"""A file that a rank does not find, because every rank made the path by itself: from the clock, or
with a random name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...events import FileRead, FileWritten
from ...report.findings import Related
from ...run import Location, Rank, Run, shorten
from .failures import Failure

_MISSING = re.compile(r"No such file or directory: (?P<quote>['\"]?)(?P<path>.+)(?P=quote)")
_MOMENT = 10
"""Digits that a folder's name holds where it is made from the clock: a count has fewer."""
_COUNT = re.compile(r"(?<!\d)\d{1,4}(?!\d)")
_DIFFERING = 2
"""Folders of the path in which the ranks may differ."""


@dataclass(frozen=True)
class MissingFile:
    """The file of that name that another rank wrote in a folder of its own."""

    rank: Rank
    event: FileWritten

    @property
    def path(self) -> str:
        return shorten(self.event.path, self.rank.cwd)

    @property
    def cause(self) -> str:
        return (
            f"rank {self.rank.rank} wrote a file of that name in another folder, {self.path}: each "
            "rank makes the path by itself, from the clock or with a random name, and they differ"
        )

    @property
    def fix(self) -> str:
        return (
            "make the path on one rank and give it to all: `paths = [path]; "
            "dist.broadcast_object_list(paths, src=0)`, with `paths[0]` on every rank"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        spot: Location | None = self.rank.location(self.event.site)
        return (Related(f"rank {self.rank.rank} wrote its own here", spot),) if spot else ()


def astray(run: Run, first: Failure) -> MissingFile | None:
    """What another rank wrote, where a path that a rank did not find is not the same on all."""
    missing = _MISSING.search(first.message)
    if missing is None or not first.kind_raised.endswith("FileNotFoundError"):
        return None
    found = [
        (MissingFile(rank, event), _apart(missing["path"], event.path))
        for rank in run.ranks.values()
        if rank is not first.rank
        for event in reversed(rank.of(FileWritten))
    ]
    if any(apart == [] for _, apart in found):
        return None  # it was written there, too late or on another machine
    return next((o for o, apart in found if apart and _by_itself(o, first, apart)), None)


def _apart(path: str, other: str) -> list[tuple[str, str]] | None:
    """The folders in which two paths of files of one name differ; None where they are not alike."""
    ours, theirs = ([p for p in name.split("/") if p != "."] for name in (path, other))
    if ours[0]:  # relative
        theirs = theirs[-len(ours) :]
    if len(ours) != len(theirs) or ours[-1] != theirs[-1]:
        return None
    apart = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    return apart if len(apart) <= _DIFFERING else None


def _by_itself(other: MissingFile, first: Failure, apart: list[tuple[str, str]]) -> bool:
    """Whether the clock or chance has named the folders, or the other rank read its own file at the
    line at which this one finds none, and they are not numbered (by the rank, say)."""
    if all(_of_the_moment(a, b) for a, b in apart):
        return True
    numbered = any(_COUNT.sub("", a) == _COUNT.sub("", b) for a, b in apart)
    return not numbered and any(
        event.path == other.event.path and _same_line(other.rank.location(event.site), first)
        for event in other.rank.of(FileRead)
    )


def _same_line(spot: Location | None, first: Failure) -> bool:
    here = first.location
    return (
        spot is not None and here is not None and (spot.file, spot.line) == (here.file, here.line)
    )


def _of_the_moment(a: str, b: str) -> bool:
    """Whether two names are alike but for the digits of a date and time, or are of `tempfile`."""
    if a.startswith("tmp") and b.startswith("tmp") and len(a) == len(b) == len("tmp12345678"):
        return True
    digits = len(re.findall(r"\d", a))
    return re.sub(r"\d", "0", a) == re.sub(r"\d", "0", b) and digits >= _MOMENT
