"""Failures of ranks as logs and error files tell them: tracebacks, and torchrun's own list."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIXES = (
    re.compile(r"\[(?:rank|default)(\d+)\]:? ?"),  # torch, and torchrun --tee
    re.compile(r"\[\d+,(\d+)\]<std(?:err|out)>: ?"),  # mpirun --tag-output
    re.compile(r" *(\d+): "),  # srun -l
)
"""How launchers mark the lines of a rank."""

_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in (.+)')
_BEGIN = "Traceback (most recent call last):"
_LAST = re.compile(r"([A-Za-z_][\w.]*): ?(.*)")
_BARE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)$")
_ENTRY = re.compile(
    r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)"
)


@dataclass(frozen=True)
class Raised:
    """An exception that ended a rank.

    Attributes:
        at: seconds since the epoch, 0 where it is unknown.
        frames: (file, line, function), outermost first.
    """

    kind: str
    message: str
    frames: tuple[tuple[str, int, str], ...]
    at: float = 0.0


def by_rank(lines: Iterable[str], rank: int = -1) -> Iterator[tuple[int, str]]:
    """The lines of a log with the rank that wrote each: by its prefix, or `rank`."""
    for line in lines:
        for prefix in _PREFIXES:
            if found := prefix.match(line):
                yield int(found[1]), line[found.end() :]
                break
        else:
            yield rank, line


def last_traceback(lines: Iterable[str], at: float = 0.0) -> Raised | None:
    """The last traceback in some lines of one rank; None for none."""
    frames: list[tuple[str, int, str]] = []
    inside = False
    found: Raised | None = None
    for line in lines:
        text = line.rstrip("\n")
        if text.strip() == _BEGIN:
            inside, frames = True, []
        elif inside and (frame := _FRAME.match(text)):
            frames.append((frame[1], int(frame[2]), frame[3].strip()))
        elif inside and text[:1] not in (" ", "\t", "") and frames:
            inside = False
            if (last := _LAST.match(text)) or _BARE.match(text):
                kind, message = (last[1], last[2]) if last else (text, "")
                found = Raised(kind, message, tuple(frames), at)
    return found


def error_file(path: Path) -> Raised | None:
    """The exception in an error file of torchelastic; None if it is none."""
    try:
        loaded = json.loads(path.read_bytes()[: 1 << 20])
        told = loaded["message"]
        if isinstance(told, str):
            return Raised(*_split(told), ())
        more = told.get("extraInfo", {})
        found = last_traceback(str(more.get("py_callstack", "")).splitlines())
        at = float(more.get("timestamp", 0) or 0)
        kind, message = _split(str(told.get("message", "")))
        return Raised(kind, message, found.frames if found else (), at)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def exit_codes(text: str) -> dict[int, tuple[int, int]]:
    """Exit code and pid of the ranks in torchrun's list of failures; a signal is negative."""
    return {int(rank): (int(code), int(pid)) for rank, code, pid in _ENTRY.findall(text)}


def root_causes(text: str) -> Iterator[tuple[int, Raised]]:
    """The tracebacks in torchrun's list of failures, by rank."""
    for block in re.split(r"\n[-=]{20,}\n|\n\[\d+\]:\n", text):
        rank = re.search(r"^\s*rank\s*: (\d+)", block, re.MULTILINE)
        told = re.search(r"^\s*traceback\s*: (Traceback.*)", block, re.MULTILINE | re.DOTALL)
        if rank and told:
            lines = [line.removeprefix("  ") for line in told[1].splitlines()]
            if (raised := last_traceback(lines, _time_of(block))) is not None:
                yield int(rank[1]), raised


def _time_of(block: str) -> float:
    found = re.search(r"^\s*time\s*: (\d+-\d+-\d+_\d+:\d+:\d+)", block, re.MULTILINE)
    try:
        return time.mktime(time.strptime(found[1], "%Y-%m-%d_%H:%M:%S")) if found else 0.0
    except ValueError:
        return 0.0


def _split(text: str) -> tuple[str, str]:
    kind, colon, message = text.partition(": ")
    return (kind, message) if colon and " " not in kind else ("Exception", text)
