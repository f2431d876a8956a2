"""Files that ranks write, and those they read that another rank may write."""

from __future__ import annotations

from .base import Event


class FileWritten(Event, frozen=True, tag="file-written"):
    """A file was opened to be written anew, saved to, or renamed onto.

    A save is recorded when it begins, without its end, and again when it is over.

    Attributes:
        at: when the writing began; `ended` when it was over, 0 where that cannot be told.
        path: real path. shared: it lies on a file system that other machines see too.
        how: `save` (torch.save), `open`, or `rename` (the whole file comes at once).
        marks: collectives issued so far by each process group of this rank, by a name that its
            members share; `marks_after` likewise when the writing was over. Two ranks that name a
            group with different numbers have met in between.
        locked: the rank held a file lock.
        times: how often this rank had written the path, this one included.
        library: the package whose code opened it, empty where that was the user's own.
        callers: the lines that led to `site`, the nearest first.
        empty: the statement closes it with nothing written: `with open(path, "w"): pass`.
    """

    path: str
    site: int
    how: str
    step: int
    ended: float = 0.0
    marks: dict[str, int] = {}
    marks_after: dict[str, int] = {}
    locked: bool = False
    shared: bool = False
    times: int = 1
    library: str = ""
    callers: tuple[int, ...] = ()
    empty: bool = False

    def describe(self) -> str:
        verb = "has written" if self.ended else "writes"
        return f"{verb} {self.path} ({self.how}, step {self.step})"


class FileLocked(Event, frozen=True, tag="file-locked"):
    """A lock on an open file was asked for (`flock`, `lockf`), the first few times per file."""

    path: str
    site: int
    shared: bool = False


class FileRead(Event, frozen=True, tag="file-read"):
    """A file of a kind that runs produce was opened for reading.

    Attributes:
        failed: what `torch.load` raised, empty where it did not (or for a plain `open`).
        stored: when the rank last came back from waiting for a key of a store, 0 for never.
        callers: the lines that led to `site`, the nearest first.
        polled: there, or in `callers`, the program has waited for another file before, in a loop;
            awaited: for another or for this one.
    """

    path: str
    site: int
    how: str
    step: int
    ended: float = 0.0
    marks: dict[str, int] = {}
    marks_after: dict[str, int] = {}
    shared: bool = False
    failed: str = ""
    stored: float = 0.0
    callers: tuple[int, ...] = ()
    polled: bool = False
    awaited: bool = False
