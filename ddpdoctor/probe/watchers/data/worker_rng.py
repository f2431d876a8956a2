"""Where the random generators stand in a DataLoader's worker processes.

A worker is no rank and records nothing. It inherits a piece of memory that it shares with its rank,
and notes there where its generators stand after its first batch (by then whatever seeds them has
done so), and which of them loading advances. Workers that are not forked inherit none.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

from ....events import WorkerRandom
from ...recording import rng_state
from ...recording.frames import passed_over, unframe
from ...recording.patching import replace

_ROW = struct.Struct("<IIIBB")  # states, generators that were drawn from, batches looked at
BATCHES = 4


class Notes:
    """What the workers of one iterator write down."""

    def __init__(self, workers: int) -> None:
        self.memory = mmap.mmap(-1, workers * _ROW.size)
        self.workers = workers
        self.rank_pid = os.getpid()

    def read(self) -> tuple[WorkerRandom, ...]:
        """Of the workers that loaded a batch."""
        found = []
        for number in range(self.workers):
            *states, drawn, batches = _ROW.unpack_from(self.memory, number * _ROW.size)
            if batches:
                names = tuple(n for bit, n in enumerate(rng_state.NAMES) if drawn >> bit & 1)
                found.append(WorkerRandom(number, tuple(states), names))
        return tuple(found)


class _Workers:
    notes: Notes | None = None


_workers = _Workers()


def install() -> None:
    from torch.utils.data import _DatasetKind

    original = _DatasetKind.create_fetcher

    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        fetcher = original(*args, **kwargs)
        notes = _workers.notes
        if notes is not None and os.getpid() != notes.rank_pid:
            _watch(fetcher, notes)
        return fetcher

    _workers.notes = None
    replace(_DatasetKind, "create_fetcher", staticmethod(passed_over(create_fetcher, original)))


def share(workers: int) -> Notes | None:
    """For the workers that are forked next; without any, or for those of an iterator that is not
    watched (0), nothing: they must not write over what others noted."""
    _workers.notes = Notes(workers) if workers else None
    return _workers.notes


def _watch(fetcher: Any, notes: Notes) -> None:
    """In a worker: look at its first batches, then get out of the way."""
    from torch.utils.data import IterableDataset, get_worker_info

    info: Any = get_worker_info()
    fetch = fetcher.fetch
    # A stream is often shuffled alike by all, and then shared out: as it begins.
    first = 1 if isinstance(info.dataset, IterableDataset) else 0
    before = rng_state.positions()
    states, drawn, batches = (0, 0, 0), 0, 0

    def look(*args: Any) -> Any:
        nonlocal before, states, drawn, batches
        try:
            batch = fetch(*args)
        except BaseException as error:
            unframe(error)
            raise
        try:
            after = rng_state.positions()
            if batches >= first:
                for bit, (old, new) in enumerate(zip(before, after, strict=True)):
                    drawn |= (old != new) << bit
            batches += 1
            states = states if batches > 1 else rng_state.digests(after)
            before = after
            _ROW.pack_into(notes.memory, info.id * _ROW.size, *states, drawn, batches)
        except Exception:
            batches = BATCHES
        if batches >= BATCHES:
            del fetcher.fetch
        return batch

    fetcher.fetch = look
