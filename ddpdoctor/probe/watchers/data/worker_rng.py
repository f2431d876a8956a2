"""What is the state of the random generators in a DataLoader's workers, and does loading use them?

A worker records no events. It writes into memory that it inherits from its rank by fork: the states
after its first batch (by then `worker_init_fn` and the data set have seeded them) and which of the
generators loading advances. Spawned workers inherit none and are not observed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import Any

import msgspec

from ....events import WorkerRandom
from ...recording import rng_state
from ...recording.frames import disguise, unframe
from ...recording.patching import replace
from ...recording.watcher import Watcher
from .own_generators import OwnDraws, OwnGenerator, digest, own_generators

_ROW = struct.Struct("<IIIBBB")
"""States, generators that were drawn from, those of the data set, batches looked at."""

_TEXT = 500
"""Bytes for the generators that a map-style data set keeps: JSON."""

BATCHES = 4
"""Batches of each worker that are looked at."""


class Notes:
    """The memory in which the workers of one iterator note their generators; one row per worker.

    Attributes:
        own: the generators that the data set keeps.
    """

    def __init__(self, workers: int, own: list[OwnGenerator]) -> None:
        self.own = own
        self.row = _ROW.size + _TEXT
        self.memory = mmap.mmap(-1, workers * self.row)
        self.workers = workers
        self.rank_pid = os.getpid()

    def read(self) -> tuple[WorkerRandom, ...]:
        """The notes of all workers that loaded a batch."""
        found = []
        for number in range(self.workers):
            at = number * self.row
            *states, drawn, own, batches = _ROW.unpack_from(self.memory, at)
            if batches:
                names = tuple(n for bit, n in enumerate(rng_state.NAMES) if drawn >> bit & 1)
                kept = {g.name: g.state for bit, g in enumerate(self.own) if own >> bit & 1}
                text = self.memory[at + _ROW.size : at + self.row].rstrip(b"\0")
                of_map: dict[str, int] = {}
                with contextlib.suppress(msgspec.DecodeError):  # it was being written
                    of_map = msgspec.json.decode(text or b"{}", type=dict[str, int])
                found.append(WorkerRandom(number, tuple(states), names, kept, of_map))
        return tuple(found)

    def write(
        self, number: int, states: tuple[int, int, int], drawn: int, own: int, batches: int,
        kept: dict[str, int],
    ) -> None:  # fmt: skip
        """Write the notes of one worker."""
        at = number * self.row
        text = msgspec.json.encode(kept)
        if len(text) <= _TEXT:
            self.memory[at + _ROW.size : at + _ROW.size + len(text)] = text
        _ROW.pack_into(self.memory, at, *states, drawn, own, batches)


class WorkerRNG(Watcher):
    lost = "the random generators of workers"

    def __init__(self) -> None:
        self.notes: Notes | None = None

    def install(self) -> None:
        from torch.utils.data import _DatasetKind

        original = _DatasetKind.create_fetcher

        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            notes = self.notes
            if notes is None or os.getpid() == notes.rank_pid:
                return original(*args, **kwargs)
            handed = _as_handed(notes)  # before the data set's `__iter__` draws
            fetcher = original(*args, **kwargs)
            self._watch(fetcher, notes, handed)
            return fetcher

        replace(_DatasetKind, "create_fetcher", staticmethod(disguise(create_fetcher, original)))

    def share(self, workers: int, stream: Any = None) -> Notes | None:
        """Make notes for the workers that are forked next; None for 0 workers. `stream` is the data
        set, if it is iterable.

        Also to be called with 0 for an iterator that is not watched, or its workers would write
        into the notes of the one before."""
        own = own_generators(stream) if workers and stream is not None else []
        self.notes = Notes(workers, own) if workers else None
        return self.notes

    def _watch(self, fetcher: Any, notes: Notes, handed: list[bool]) -> None:
        """In a worker: wrap `fetch` for its first batches."""
        from torch.utils.data import IterableDataset, get_worker_info

        info: Any = get_worker_info()
        fetch = fetcher.fetch
        # An iterable data set often shuffles equally in all workers when it begins, and then takes
        # its share: draws of its first batch prove nothing.
        iterable = isinstance(info.dataset, IterableDataset)
        first = 1 if iterable else 0
        kept_draws = OwnDraws(None if iterable else info.dataset)
        before = rng_state.positions()
        states, drawn, own, batches = (0, 0, 0), 0, 0, 0

        def look(*args: Any) -> Any:
            nonlocal before, states, drawn, own, batches
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
                for bit, (kept, same) in enumerate(zip(notes.own, handed, strict=True)):
                    own |= (same and kept.advanced()) << bit
                kept_draws.look()
                batches += 1
                states = states if batches > 1 else rng_state.digests(after)
                before = after
                notes.write(info.id, states, drawn, own, batches, kept_draws.states)
            except Exception:
                batches = BATCHES
            if batches >= BATCHES:
                del fetcher.fetch
            return batch

        fetcher.fetch = look


def _as_handed(notes: Notes) -> list[bool]:
    """In a worker: which generators of the data set are in the state in which the rank has them; a
    `worker_init_fn` may have seeded them."""
    try:
        return [digest(kept.generator) == kept.state for kept in notes.own]
    except Exception:
        return [False] * len(notes.own)
