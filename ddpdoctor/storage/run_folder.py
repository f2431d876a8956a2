"""The run folder on disk: append, read back, follow; torn tails and foreign lines are tolerated.

Layout (names are public, see the README):

    run.json  findings.json  rank-<R>.log  rank-<R>.jsonl  rank-<R>.stacks.txt  node-<N>.jsonl
    nodes/<N>/  (the same of node N, where it has no access to this folder and has sent it)

Rank numbers are zero-padded to the width of the largest. A restart by the launcher
(`--max-restarts`) writes to `restart-<K>/`, one folder per attempt. Two processes
that claim one rank do not share a file: the second writes `rank-<R>.pid-<P>.jsonl`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..events import Event, decode, encode
from ..events.json_text import UNREADABLE, to_json
from .safe_fd import HeldFile

RANK_LIMIT_BYTES = 16 * 1024 * 1024
"""Most that one rank's event file may take. What would exceed it is counted, not written."""

LONGEST_LINE = 4 * 1024 * 1024

_RANK_FILE = re.compile(r"rank-(\d+)(?:\.pid-(\d+))?\.jsonl")
_NODE_FILE = re.compile(r"node-(\d+)\.jsonl")
_PROBE_ERRORS = re.compile(r"probe-errors-(\d+)\.txt")
_LAST_LINE = 2000
"""Bytes at the end of a file in which its last line is looked for."""
_RESTART_FOLDER = re.compile(r"restart-(\d+)")
_NUMBER = re.compile(r"\d{1,7}")

NODES = "nodes"
"""Where a run folder keeps what other nodes sent; in each of these `CLOCK` says how its clock
goes."""
CLOCK = "clock-ahead"


class FolderError(Exception):
    """The folder cannot be used. The message is one line that says what to type instead."""


LEFT_BEHIND = "left behind"
"""The begin of `RunInfo.launcher` of a run that the doctor did not examine."""


class RunInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`run.json`: what was run and how it ended.

    Attributes:
        machine: what it ran on, as in the report's head.
        ended_at, exit_code, outcome: absent while the run goes on, and for ever where the
            launcher itself was killed.
    """

    schema_version: int
    id: str
    command: list[str]
    started_at: str
    tool_version: str
    world_size: int = 0
    nodes: int = 1
    node_rank: int = 0
    node: str = ""
    ended_at: str | None = None
    exit_code: int | None = None
    outcome: str | None = None
    torch: str = ""
    python: str = ""
    platform: str = ""
    launcher: str = "run"
    stopped_by_doctor: bool = False
    budget_percent: float = 1.0
    machine: list[str] = []


class RunFolder:
    """Paths and small files of one run. Opening one reads nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make the folder, private to the user.

        Raises:
            FolderError: it cannot be made, or holds another run.
        """
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (folder.path / "run.json").exists():
                names = (f"{folder.path}-{n}" for n in itertools.count(2))
                free = next(name for name in names if not os.path.exists(name))
                raise FolderError(
                    f"{path} already holds a run; give another folder, as `--out {free}`"
                )
            folder.path.chmod(0o700)
        except OSError as error:
            raise FolderError(
                f"cannot write to {path} ({error.strerror}); give another folder with --out"
            ) from error
        return folder

    @property
    def info_path(self) -> Path:
        return self.path / "run.json"

    @property
    def findings_path(self) -> Path:
        return self.path / "findings.json"

    def node_path(self, node_rank: int) -> Path:
        return self.path / f"node-{node_rank}.jsonl"

    def write_info(self, info: RunInfo) -> None:
        write_private(self.info_path, msgspec.json.format(to_json(info)))

    def read_info(self) -> RunInfo | None:
        """`run.json`, or None where it is missing or unreadable."""
        try:
            return msgspec.json.decode(self.info_path.read_bytes(), type=RunInfo)
        except (OSError, *UNREADABLE):
            return None

    def attempts(self) -> list[int]:
        """Numbers of the launcher's attempts that left records, in order."""
        found = {0}
        for folder in (self, *(other for _, other in self.other_nodes())):
            inside = _children(folder.path, _RESTART_FOLDER)
            found.update(int(m[1]) for m, path in inside if path.is_dir())
        return sorted(found)

    def attempt_path(self, attempt: int) -> Path:
        return self.path / f"restart-{attempt}" if attempt else self.path

    def rank_files(self, attempt: int = 0) -> list[tuple[int, Path]]:
        """(rank, event file) of an attempt, by rank; a rank may have several files."""
        return [(int(m[1]), p) for m, p in _children(self.attempt_path(attempt), _RANK_FILE)]

    def stacks_files(self, rank: int, attempt: int = 0) -> list[Path]:
        """The stack dumps of a rank."""
        names = re.compile(rf"rank-0*{rank}(?:\.pid-\d+)?\.stacks\.txt")
        return [path for _, path in _children(self.attempt_path(attempt), names)]

    def node_files(self) -> list[tuple[int, Path]]:
        return [(int(m[1]), p) for m, p in _children(self.path, _NODE_FILE)]

    def probe_error(self) -> str:
        """The last line of the first traceback that a process left because it could not load the
        probe; empty where none did."""
        for _, path in _children(self.path, _PROBE_ERRORS):
            with contextlib.suppress(OSError):
                lines = path.read_bytes()[-_LAST_LINE:].decode(errors="replace").split("\n")
                if said := next((line for line in reversed(lines) if line.strip()), ""):
                    return printable(said.strip())
        return ""

    def clock_ahead_s(self) -> float:
        """By how much this node's wall clock is ahead of the first node's, by what that has
        written down."""
        try:
            return float((self.path / CLOCK).read_bytes()[:40])
        except (OSError, ValueError):
            return 0.0

    def other_nodes(self) -> list[tuple[int, RunFolder]]:
        """The records that other nodes sent, by the number of the node."""
        inside = self.path / NODES
        return [(int(m[0]), RunFolder(p)) for m, p in _children(inside, _NUMBER) if p.is_dir()]


def rank_stem(rank: int, world_size: int) -> str:
    """`rank-07` for rank 7 of 16."""
    width = len(str(max(world_size - 1, rank, 0)))
    return f"rank-{max(rank, 0):0{width}d}"


def plain_name(name: str) -> str:
    """A name for a file or folder, without characters that shells and file systems treat
    specially."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80] or "run"


def write_private(path: Path, content: bytes) -> None:
    """Replace a file as a whole, readable by the user alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class EventWriter:
    """Appends events to a file and their descriptions to a log beside it.

    Every record goes to the kernel in one `write`, so that what was seen survives `kill -9`; one
    that fails (disk full) is counted in `dropped` and the next one is tried again. A `shared`
    file may exist already and have other writers; only files of nodes do. Descriptors that the
    program closes or replaces are opened anew.
    """

    def __init__(
        self,
        path: Path,
        log: Path | None = None,
        *,
        limit: int = RANK_LIMIT_BYTES,
        shared: bool = False,
    ):
        self.path = path
        self._file = HeldFile(path, exclusive=not shared)
        self._log = HeldFile(log) if log else None
        self._limit = limit
        self._torn = False
        self.size = 0
        self.count = 0
        self.dropped = 0

    def write(self, event: Event, *, vital: bool = False) -> bool:
        """Append one event. A `vital` one may exceed the size limit. False where it was lost."""
        line = encode(event)
        if self.size + len(line) > self._limit and not vital:
            self.dropped += 1
            return False
        if self._torn:  # finish the line that a full disk cut short, so that only it is lost
            line = b"\n" + line
        try:
            written = self._file.write(line)
        except OSError:
            self.dropped += 1
            return False
        self.size += written
        self._torn = written < len(line)
        if self._torn:
            self.dropped += 1
            return False
        self.count += 1
        if self._log and (text := event.describe()):
            self.say(text)
        return True

    def say(self, text: str) -> None:
        """Append one line to the log, with the wall-clock time."""
        if self._log is None or self.size > self._limit:
            return
        clock = time.strftime("%H:%M:%S")
        try:
            line = f"{clock} {printable(text)}\n".encode(errors="replace")
            self.size += self._log.write(line)
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        self._file.close()
        if self._log:
            self._log.close()


def read_plain(path: Path) -> bytes:
    """What a file holds; nothing where it is no plain file, or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return file.read() if _is_regular(file.fileno()) else b""
    except OSError:
        return b""


class Lines:
    """Follows a file that may still grow, yielding whole lines only.

    Attributes:
        unreadable: lines that are no events.
        torn: the file ended in the middle of a line when it was last read.
        foreign: it is a link, a folder or a pipe, none of which ddpdoctor makes.
        refused: why it may not be read; empty where it may.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.unreadable = 0
        self.torn = False
        self.foreign = False
        self.refused = ""

    def events(self, unwanted: bytes = b"") -> Iterator[Event]:
        """The events since the last call. Lines that are not events are counted and skipped.

        Args:
            unwanted: how lines begin that are left out; none where it is empty.
        """
        try:
            # Only plain files: a link or a pipe in a folder from elsewhere is not followed.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.foreign = error.errno == errno.ELOOP
            if error.errno != errno.ENOENT:
                self.refused = error.strerror or "error"
            return
        self.refused = ""
        if not _is_regular(fd):
            os.close(fd)
            self.foreign = True
            return
        with os.fdopen(fd, "rb") as file:
            file.seek(self._offset)
            self.torn = False
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST_LINE:
                        self.torn = True
                        break  # torn tail: still being written, or the last thing before a kill
                    self.unreadable += 1
                    self._offset += len(line)
                    continue
                self._offset += len(line)
                if line == b"\n" or (unwanted and line.startswith(unwanted)):
                    continue
                try:
                    event = decode(line)
                except UNREADABLE:
                    self.unreadable += 1
                    continue
                yield event


def printable(text: str) -> str:
    """`text` on one line, without control characters (terminal escapes stay visible as text)."""
    return "".join(c if c.isprintable() else "\ufffd" if c not in "\n\r\t" else " " for c in text)


def _is_regular(fd: int) -> bool:
    import stat

    return stat.S_ISREG(os.fstat(fd).st_mode)


def _children(path: Path, names: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    """What a folder holds under such names, in order."""
    try:
        every = sorted(os.listdir(path))
    except OSError:
        return []
    return [(match, path / name) for name in every if (match := names.fullmatch(name))]
