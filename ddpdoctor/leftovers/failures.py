"""Failures of ranks as logs and error files tell them: tracebacks, and torchrun's own list."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"\[(?:rank|default|[A-Za-z][\w-]*?(?=\d+\]:))(\d+)\]:? ?")
"""torch's mark of a rank, and that of torchrun --tee with the name of the role; both may stand
there, the latter first."""

_OUTER = (
    re.compile(r"\[\d+,(\d+)\]<std(?:err|out)>: ?"),  # mpirun --tag-output
    re.compile(r" *(\d+): "),  # srun -l
)
"""How launchers mark the lines of a rank, before all else."""

_MOST_MARKS = 3
_LARGEST_ERROR = 16 << 20
_MOST_LEADS = 8

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
    """The lines of a log with the rank that wrote each: by its marks, the innermost of them, or
    `rank`."""
    for line in lines:
        yield _marked(line, rank)


def _marked(line: str, rank: int) -> tuple[int, str]:
    for outer in _OUTER:
        if found := outer.match(line):
            rank, line = int(found[1]), line[found.end() :]
            break
    for _ in range(_MOST_MARKS):
        if (found := _MARK.match(line)) is None:
            break
        rank, line = int(found[1]), line[found.end() :]
    return rank, line


def without_leads(lines: Sequence[str]) -> list[str]:
    """The lines without what a logger has put before each of them: a time, a host. What that is is
    read off the line in which a traceback begins, numbers aside."""
    leads: dict[str, None] = {}
    for line in lines:
        head, begin, rest = line.rstrip().rpartition(_BEGIN)
        in_list = head.strip().rstrip(" :") == "traceback"  # torchrun's, which is no lead
        if begin and not rest and not in_list and (lead := _unmarked(head)).strip():
            leads[re.sub(r"\d+", r"\\d+", re.escape(lead))] = None
    if not leads:
        return list(lines)
    pattern = re.compile("|".join(list(leads)[:_MOST_LEADS]))
    return [line[found.end() :] if (found := pattern.match(line)) else line for line in lines]


def _unmarked(head: str) -> str:
    """What stands before the marks of ranks at the end of a text."""
    for at in range(len(head) + 1):
        if _marked(head[at:], -1)[1] == "":
            return head[:at]
    return head


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
    """The exception in an error file of torchelastic; None if it is none, or is cut short.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            loaded = json.loads(file.read(_LARGEST_ERROR))
        told = loaded["message"]
        if isinstance(told, str):
            return Raised(*_split(told), ())
        more = told.get("extraInfo", {})
        found = last_traceback(str(more.get("py_callstack", "")).splitlines())
        at = float(more.get("timestamp", 0) or 0)
        kind, message = _split(str(told.get("message", "")))
        return Raised(kind, message, found.frames if found else (), at)
    except (ValueError, KeyError, TypeError, AttributeError):
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
