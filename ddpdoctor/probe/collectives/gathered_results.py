"""Do results of single samples that are gathered reach a metric as they are?

Only gathered samples show that duplicates of a `DistributedSampler` reach a metric. Of objects
(`all_gather_object`) the size is recorded: an entry per sample, or a few sums? Of tensors, whether
the program may drop some of their rows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from ...events import GatheredWhole, ObjectsGathered
from ..recording.recorder import Recorder
from ..recording.watcher import Watcher
from ..source.row_selection import may_select

VISITED = 4096
"""Parts of one object that are counted; objects with more count as `ENDLESS`."""

PLACES = 32
"""Lines that gather tensors which are searched for what selects among the rows."""

ENDLESS = 1 << 40
"""Stands for a size that is not known."""

_TABLES = (dict, OrderedDict, defaultdict, Counter)
_ROWS = (list, set, frozenset, deque)


class GatheredResults(Watcher):
    lost = "what becomes of gathered results"

    def __init__(self) -> None:
        self._recorded: dict[int, int] = {}  # the largest size so far, by call site
        self._searched: set[int] = set()  # call sites

    def record_object(self, recorder: Recorder, place: int, value: Any) -> None:
        """Record the size of an object that is gathered at a call site, if it exceeds those before.

        Rounded up (to 2**n - 1), so that lengths that vary are recorded a few times only.
        """
        found = entries(value)
        if place >= 0 and found > self._recorded.get(place, -1):
            self._recorded[place] = found = (1 << found.bit_length()) - 1
            event = ObjectsGathered(at=time.monotonic(), call_site=place, entries=found)
            recorder.emit(event, vital=True)

    def record_tensor(self, recorder: Recorder, place: int, tensor: Any) -> None:
        """Record that the rows of a tensor, gathered at a call site, are used as they are."""
        if place < 0 or place in self._searched or len(self._searched) >= PLACES:
            return
        if not getattr(tensor, "ndim", 0):
            return
        self._searched.add(place)
        if not may_select(sys._getframe(1), recorder.sites.kind):
            by = recorder.sites.library_called()
            recorder.emit(GatheredWhole(at=time.monotonic(), call_site=place, by=by), vital=True)


def entries(value: Any) -> int:
    """How many numbers and characters an object holds, plus one for each container; `ENDLESS` if
    that is not known."""
    total, left = 0, VISITED
    waiting = [value]
    while waiting:
        part = waiting.pop()
        left -= 1
        inner = _parts(part)
        total += _leaf_size(part) if inner is None else 1
        if len(inner or ()) + len(waiting) > left:
            return ENDLESS
        waiting += inner or ()
    return min(total, ENDLESS)


def _parts(part: Any) -> Any:
    """The entries of a container, None for anything else."""
    if type(part) in _TABLES:
        return part.values()
    return part if type(part) in _ROWS or isinstance(part, tuple) else None


def _leaf_size(part: Any) -> int:
    if part is None or isinstance(part, (bool, int, float, complex)):
        return 1
    if isinstance(part, (str, bytes, bytearray)):
        return len(part)
    try:
        size = part.numel if hasattr(part, "numel") else part.size  # a tensor, an array
        return int(size() if callable(size) else size)
    except Exception:  # raised by the user's class
        return ENDLESS
