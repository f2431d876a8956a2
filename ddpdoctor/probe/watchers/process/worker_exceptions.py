"""What did a DataLoader worker raise?

torch raises it again in the rank, as an exception whose text contains the worker's traceback. That
text is parsed here.
"""

from __future__ import annotations

import os
import re

from ....events import Frame, Relayed
from ...recording.code_locations import USER, Sites

_CAUGHT = re.compile(
    r"Caught \S+ in ([^\n]+)\.\nOriginal Traceback \(most recent call last\):\n"
)  # torch's ExceptionWrapper
_LAST = "\nTraceback (most recent call last):\n"
_FRAME = re.compile(r'  File "([^"\n]+)", line (\d+), in ([^\n]+)')
_ENDS = re.compile(r"([^\W\d][\w.]*)(?::[ \n]?(.*))?", re.DOTALL)


def relayed(text: str, sites: Sites, limit: int) -> Relayed | None:
    """Parse the message of an exception that torch relays from a worker; None for any other text.

    Args:
        limit: characters of the worker's message to keep.
    """
    caught = _CAUGHT.match(text)
    if caught is None:
        return None
    trace = text[caught.end() :]
    trace = trace[trace.rfind(_LAST) + 1 :]  # of chained exceptions the last one
    frames: list[Frame] = []
    lines = trace.splitlines()
    at = 0
    for number, line in enumerate(lines):
        found = _FRAME.fullmatch(line)
        if found:
            frames.append(_frame(sites, found[1], int(found[2]), found[3]))
            at = number
    rest = at + 1
    while rest < len(lines) and lines[rest].startswith("  "):  # source line and its carets
        rest += 1
    ended = _ENDS.fullmatch("\n".join(lines[rest:]).rstrip())
    if ended is None or not frames:
        return None
    message = ended[2] or ""
    return Relayed(where=caught[1], kind=ended[1], message=message[:limit], frames=tuple(frames))


def _frame(sites: Sites, file: str, line: int, function: str) -> Frame:
    kind = sites.kind_of(file)
    if kind == USER:  # record the text of the line too
        sites.place(file, line, function)
    return Frame(file=os.path.abspath(file), line=line, function=function, user=kind == USER)
