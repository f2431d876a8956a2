"""faulthandler's dumps (`rank-R.stacks.txt`) to frames."""

from __future__ import annotations

import linecache
import re

from .events import StackFrame

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_NOT_USERS = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<")
_OURS = re.compile(r"/ddpdoctor/(?:probe|shim)/")
_LONGEST = 60


def threads(dump: str) -> list[tuple[StackFrame, ...]]:
    """The stacks in a text of one or more dumps, each innermost frame first."""
    found: list[list[StackFrame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif (match := _FRAME.match(line)) and found and len(found[-1]) < _LONGEST:
            if _OURS.search(match[1]):
                continue
            found[-1].append(_frame(match[1], int(match[2]), match[3]))
    return [tuple(frames) for frames in found]


def main_thread(dump: str) -> tuple[StackFrame, ...]:
    """The main thread's stack in the last dump: faulthandler lists it last."""
    every = threads(dump)
    return every[-1] if every else ()


def _frame(file: str, line: int, function: str) -> StackFrame:
    user = _NOT_USERS.search(file) is None
    text = linecache.getline(file, line).strip()[:300] if user else ""
    return StackFrame(file=file, line=line, function=function, user=user, text=text)
