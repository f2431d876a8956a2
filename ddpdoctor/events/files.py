"""Files that ranks write, and files they read that another rank may write."""

from __future__ import annotations

from .base import Event


class FileWritten(Event, frozen=True, tag="file-written"):
    """A file was opened with truncation, saved to, or replaced by a rename; or a folder was moved.

    A save is recorded when it begins, without its end, and again when it is over.

    Attributes:
        at: when the write began; `ended` when it was over, 0 if unknown.
        path: real path; `shared` if it is on a network file system.
        how: `save` (torch.save), `open`, `rename` (which replaces the file atomically), or `into`
            (`shutil.move` of a folder to a path that is a folder already: it is put inside).
        tree: it is a folder that is moved to the path.
        marks: collectives issued so far in each process group of this rank, by the group's common
            name; `marks_after` likewise after the write. If two ranks have different numbers for a
            group, they have synchronised in between.
        locked: the rank held a file lock.
        times: number of writes of this rank to the path, this one included.
        library: the package that opened it, empty for the user's own code.
        callers: the lines that called `site`, the nearest first.
        empty: the statement only truncates it: `with open(path, "w"): pass`.
        in_thread: by a thread other than the main one.
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
    tree: bool = False
    in_thread: bool = False

    def describe(self) -> str:
        verb = "has written" if self.ended else "writes"
        return f"{verb} {self.path} ({self.how}, step {self.step})"


class FileLocked(Event, frozen=True, tag="file-locked"):
    """A lock on an open file was requested (`flock`, `lockf`); recorded at first."""

    path: str
    site: int
    shared: bool = False


class FileRemoved(Event, frozen=True, tag="file-removed"):
    """A file, or a whole folder (`tree`), is about to be removed by a line of the program."""

    path: str
    site: int
    tree: bool = False


class FolderMade(Event, frozen=True, tag="folder-made"):
    """A folder that is not there is about to be made by a line of the program."""

    path: str
    site: int


class SavedPart(Event, frozen=True, tag="saved-part"):
    """`torch.save` was given tensors of which this rank holds a shard only, or the state of an
    optimizer without that of some parameters.

    Attributes:
        path: empty where it writes to a buffer.
        step: optimizer steps of this process before it.
        shards: of the `tensors` in it those that are shards; `ranks` hold them together.
        lacking: of the `parameters` of the optimizers those without a state, while others have one.
    """

    RANKS = ("ranks",)

    path: str
    step: int
    site: int
    shards: int
    tensors: int
    ranks: tuple[int, ...]
    lacking: int
    parameters: int


class FileRead(Event, frozen=True, tag="file-read"):
    """A file of a kind that runs produce was opened for reading.

    Attributes:
        failed: the exception of `torch.load`, empty if it raised none (or for a plain `open`).
        stored: when the rank last returned from waiting for a key of a store, 0 for never.
        callers: the lines that called `site`, the nearest first.
        polled: `site` or one of `callers` follows a loop that waits for another file; `awaited`:
            for another file or this one.
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
