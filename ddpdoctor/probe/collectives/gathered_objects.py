"""How much the objects hold that are gathered: an entry for each sample, or a few sums."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from ...events import ObjectsGathered
from ..recording.recorder import Recorder

VISITED = 4096
"""Parts of one object that are looked at; what has more counts as endless."""

ENDLESS = 1 << 40

_TABLES = (dict, OrderedDict, defaultdict, Counter)
_ROWS = (list, set, frozenset, deque)

_recorded: dict[int, int] = {}
"""Entries on record by call site."""


def install() -> None:
    _recorded.clear()


def record_object(recorder: Recorder, place: int, value: Any) -> None:
    """An object is gathered at a call site. Written where it holds more than those before; rounded
    up, so that lengths that vary are written a few times only."""
    found = entries(value)
    if place >= 0 and found > _recorded.get(place, -1):
        _recorded[place] = found = (1 << found.bit_length()) - 1
        event = ObjectsGathered(at=time.monotonic(), call_site=place, entries=found)
        recorder.emit(event, vital=True)


def entries(value: Any) -> int:
    """How many numbers and letters an object holds, one more for each container; `ENDLESS` where
    that cannot be told."""
    total, left = 0, VISITED
    waiting = [value]
    while waiting:
        part = waiting.pop()
        left -= 1
        inner = _parts(part)
        total += _plain(part) if inner is None else 1
        if len(inner or ()) + len(waiting) > left:
            return ENDLESS
        waiting += inner or ()
    return min(total, ENDLESS)


def _parts(part: Any) -> Any:
    """Those of a container, None for anything else."""
    if type(part) in _TABLES:
        return part.values()
    return part if type(part) in _ROWS or isinstance(part, tuple) else None


def _plain(part: Any) -> int:
    if part is None or isinstance(part, (bool, int, float, complex)):
        return 1
    if isinstance(part, (str, bytes, bytearray)):
        return len(part)
    try:
        size = part.numel if hasattr(part, "numel") else part.size  # a tensor, an array
        return int(size() if callable(size) else size)
    except Exception:  # of the user's class
        return ENDLESS
