"""A file or folder that a rank does not find: because every rank built the path itself, from the
clock or with a random name; or because another rank has not written it yet, or has removed it, or
removes it at the same time. Or a folder that it finds, as another rank makes it, too."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ...events import FileRead, FileRemoved, FileWritten, FolderMade
from ...report.findings import Related
from ...run import Location, Rank, Run, shorten
from .failures import Failure
from .thresholds import DIFFERING_FOLDERS, TIMESTAMP_DIGITS

_MISSING = re.compile(r"No such file or directory: (?P<quote>['\"]?)(?P<path>.+)(?P=quote)")
_NO_FOLDER = re.compile(r"Parent directory (?P<path>.+) does not exist")
"""What torch.save says."""
_EXISTS = re.compile(r"File exists: (?P<quote>['\"]?)(?P<path>.+)(?P=quote)")
_COUNT = re.compile(r"(?<!\d)\d{1,4}(?!\d)")

_Attempt = TypeVar("_Attempt", FileRemoved, FolderMade)

ADVICE = {
    "FileNotFoundError": (
        "if another rank writes the file, call `dist.barrier()` between the write and the read; "
        "otherwise look for what differs on {named}: its data shard, its paths"
    ),
    "FileExistsError": (
        "where every rank makes this folder or file, one is first and the others fail: use "
        "`os.makedirs(path, exist_ok=True)`, or make it on one rank and call `dist.barrier()`"
    ),
}
"""What to do about files that one rank does not find, or finds already there."""


@dataclass(frozen=True)
class MissingFile:
    """The file of the same name that another rank wrote in a folder of its own."""

    rank: Rank
    event: FileWritten | FileRemoved | FolderMade
    rule: ClassVar[str] = "rank-specific-path"
    did: ClassVar[str] = "written"
    here: ClassVar[str] = "wrote its file here"

    @property
    def path(self) -> str:
        return shorten(self.event.path, self.rank.cwd)

    @property
    def cause(self) -> str:
        return (
            f"rank {self.rank.rank} wrote this file to a different folder, {self.path}: each rank "
            "builds the path itself, from the clock or with a random name, so the paths differ"
        )

    @property
    def fix(self) -> str:
        return (
            "build the path on one rank and broadcast it: `paths = [path]; "
            "dist.broadcast_object_list(paths, src=0)`, then use `paths[0]` on every rank"
        )

    @property
    def related(self) -> tuple[Related, ...]:
        spot: Location | None = self.rank.location(self.event.site)
        return (Related(f"rank {self.rank.rank} {self.here}", spot),) if spot else ()


@dataclass(frozen=True)
class FileOfOtherTime(MissingFile):
    """The very file, or one in the folder, that another rank wrote at another time.

    Attributes:
        later_s: how many seconds after the failure; negative for before it.
        missed: the path that was not found.
    """

    later_s: float
    missed: str
    rule: ClassVar[str] = "other-moment"
    here: ClassVar[str] = "wrote here"

    @property
    def _who(self) -> str:
        return f"rank {self.rank.rank}"

    @property
    def cause(self) -> str:
        if self.later_s >= 0:
            return (
                f"{self._who} writes {self.path} only {self.later_s:.2g} s later, and nothing "
                "makes this rank wait for it"
            )
        return (
            f"{self._who} had written {self.path} {-self.later_s:.2g} s before: {self.missed} was "
            "renamed or removed since, while this rank still needed it"
        )

    @property
    def fix(self) -> str:
        if self.later_s >= 0:
            return (
                f"call `dist.barrier()` on all ranks after {self._who} has made it; a folder can "
                "be made by each rank: `os.makedirs(folder, exist_ok=True)`"
            )
        return (
            "rename or remove it on one rank, once all ranks are done with it: call "
            "`dist.barrier()` on all ranks before that line"
        )


@dataclass(frozen=True)
class RemovedTwice(MissingFile):
    """What a rank failed to remove, because another rank removes it as well."""

    rule: ClassVar[str] = "removed-twice"
    did: ClassVar[str] = "removed"
    here: ClassVar[str] = "removes it here"

    @property
    def cause(self) -> str:
        return (
            f"rank {self.rank.rank} removes {self.path} as well, and nothing makes one of them "
            "wait for the other"
        )

    @property
    def fix(self) -> str:
        return (
            "remove it on one rank (`if dist.get_rank() == 0: ...`), then call `dist.barrier()` on "
            "all ranks, before any of them looks for it again"
        )


@dataclass(frozen=True)
class MadeTwice(MissingFile):
    """A folder that a rank failed to make, because another rank makes it as well.

    Attributes:
        before_s: how many seconds before the failure the other rank made it.
    """

    before_s: float
    rule: ClassVar[str] = "made-twice"
    did: ClassVar[str] = "made"
    here: ClassVar[str] = "makes it here"

    @property
    def cause(self) -> str:
        return (
            f"rank {self.rank.rank} makes {self.path} as well, and did so {self.before_s:.2g} s "
            "before. A check whether it exists does not help: all ranks look before one of them "
            "makes it"
        )

    @property
    def fix(self) -> str:
        return ADVICE["FileExistsError"].partition(": ")[2]


def _made_twice(run: Run, first: Failure) -> MadeTwice | None:
    """The folder that another rank made, where a rank failed to make it."""
    there = _EXISTS.search(first.message)
    if there is None or not first.kind_raised.endswith("FileExistsError"):
        return None
    path = posixpath.normpath(posixpath.join(first.rank.cwd, there["path"]))
    found = _at_once(run, first, FolderMade, path)
    return MadeTwice(*found, first.at - found[0].wall(found[1].at)) if found else None


def _removed_twice(run: Run, first: Failure) -> RemovedTwice | None:
    """What another rank removed, too, where a rank failed in the line that removes it."""
    kind = first.kind_raised.rpartition(".")[2]
    mine = first.rank.latest(FileRemoved)
    if kind not in ("FileNotFoundError", "OSError") or mine is None:
        return None
    if first.rank.location(mine.site) != first.location:
        return None
    found = _at_once(run, first, FileRemoved, mine.path)
    return RemovedTwice(*found) if found else None


def _at_once(
    run: Run, first: Failure, kind: type[_Attempt], path: str
) -> tuple[Rank, _Attempt] | None:
    """The rank of the same machine that did the same to a path before the failure, and its record;
    rather one that did not fail itself, as attempts are on record."""
    found = [
        (rank, event)
        for rank in run.ranks.values()
        if rank is not first.rank and rank.node == first.rank.node
        for event in rank.of(kind)
        if event.path == path and rank.wall(event.at) <= first.at
    ]
    return min(found, key=lambda one: one[0].exception is not None, default=None)


def missing_file(run: Run, first: Failure) -> MissingFile | None:
    """What another rank did, where a rank failed because it did not find a file or folder: it wrote
    the file under a path of its own, or at another time, or removes it as well; or made the folder
    that this one wanted to make. None where that is not clear."""
    if (twice := _removed_twice(run, first) or _made_twice(run, first)) is not None:
        return twice
    if (other := _of_other_time(run, first)) is not None:
        return other
    missing = _MISSING.search(first.message)
    if missing is None or not first.kind_raised.endswith("FileNotFoundError"):
        return None
    found = [
        (MissingFile(rank, event), _differing_folders(missing["path"], event.path))
        for rank in run.ranks.values()
        if rank is not first.rank
        for event in reversed(rank.of(FileWritten))
    ]
    if any(folders == [] for _, folders in found):
        return None  # the same path: written too late, or on another machine
    return next(
        (o for o, folders in found if folders and _built_by_each_rank(o, first, folders)), None
    )


def _of_other_time(run: Run, first: Failure) -> FileOfOtherTime | None:
    """The write of another rank to the path that was not found, or into that folder, that is
    nearest to the failure in time."""
    missing = _NO_FOLDER.search(first.message)
    if missing is None and first.kind_raised.endswith("FileNotFoundError"):
        missing = _MISSING.search(first.message)
    if missing is None:
        return None
    path = posixpath.normpath(posixpath.join(first.rank.cwd, missing["path"]))
    found = [
        FileOfOtherTime(rank, event, rank.wall(event.at) - first.at, shorten(path, first.rank.cwd))
        for rank in run.ranks.values()
        if rank is not first.rank and rank.node == first.rank.node
        for event in rank.of(FileWritten)
        if event.path == path or event.path.startswith(f"{path}/")
    ]
    # A file that was written before may be on another machine.
    told = [other for other in found if other.later_s > 0 or other.event.path != path]
    return min(told, key=lambda other: abs(other.later_s), default=None)


def _differing_folders(path: str, other: str) -> list[tuple[str, str]] | None:
    """The folders in which two paths of files of one name differ; None where too many do."""
    ours, theirs = ([p for p in name.split("/") if p != "."] for name in (path, other))
    if ours[0]:  # relative
        theirs = theirs[-len(ours) :]
    if len(ours) != len(theirs) or ours[-1] != theirs[-1]:
        return None
    folders = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    return folders if len(folders) <= DIFFERING_FOLDERS else None


def _built_by_each_rank(other: MissingFile, first: Failure, folders: list[tuple[str, str]]) -> bool:
    """Whether the folders are named by the clock or at random; or the other rank read its own file
    on the line on which this one failed, and the folders are not numbered (by rank, say)."""
    if all(_of_the_moment(a, b) for a, b in folders):
        return True
    numbered = any(_COUNT.sub("", a) == _COUNT.sub("", b) for a, b in folders)
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
    """Whether two names differ only in the digits of a date and time, or come from `tempfile`."""
    if a.startswith("tmp") and b.startswith("tmp") and len(a) == len(b) == len("tmp12345678"):
        return True
    digits = len(re.findall(r"\d", a))
    return re.sub(r"\d", "0", a) == re.sub(r"\d", "0", b) and digits >= TIMESTAMP_DIGITS
