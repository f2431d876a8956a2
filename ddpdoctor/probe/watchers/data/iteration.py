"""What one iteration over a loader consumed: indices, counts, order. Bounded.

Exact up to a cap; beyond it, one index in k by hash, the same subset on every rank. Which k only
depends on how much was read before, so that ranks that read alike record alike.
"""

from __future__ import annotations

import itertools
import sys
import time
import zlib
from array import array
from typing import Any

from ....events import EpochEnded, IndicesRead
from ....events.pack import pack_ascending
from ...recording.index_sample import SCATTER, halvings, kept, key
from ...recording.recorder import Recorder
from ...tensors.sample_digests import Fingerprints, memories
from .worker_rng import Notes

CAP = 1 << 18
"""Indices recorded in full, per line that makes loaders; then half of that many, ..."""

EPOCHS_IN_FULL = 256
"""Epochs recorded one by one, per line that makes loaders; then every second, every fourth..."""

CHUNK = 32768
"""Indices kept in memory before they are written."""

LOOK_EVERY = 64
"""Batches whose lists of indices are kept before their numbers are copied."""

HEAD = 16
FIRST_WRITE_S, SLOWEST_WRITE_S = 1.0, 60.0


class Place:
    """All loaders made at one line: what they delivered so far."""

    def __init__(self) -> None:
        self.loaders = 0
        self.epochs = 0
        self.indices = 0
        self.interval_s = FIRST_WRITE_S


class Reading:
    """One iteration over a loader, while it goes on.

    Attributes:
        given: lists of indices handed out and not yet counted; workers run ahead.
        batches: delivered to the loop; `trained` of them were followed by a backward or a step,
            `evaluated` by a forward that does not train.
        silent: only counted, not recorded.
        notes: of worker processes that it may have begun.
        sampler: id of the one that chooses the samples; `orders`: before which batch it began one,
            and its `epoch` then, None where that was ever set.
        look_at, write_at: number of batches and time at which to look closer next.
        looked, memory: the number of batches when one was looked at last, and where that one lies.
    """

    def __init__(
        self,
        loader: int,
        number: int,
        place: Place,
        fingerprints: Fingerprints | None,
        *,
        silent: bool = False,
    ) -> None:
        self.loader = loader
        self.number = number
        self.place = place
        self.silent = silent
        self.fingerprints = fingerprints
        self.watch_random = False
        self.notes: Notes | None = None
        self.given: list[Any] = []
        self.counted = 0
        self.batches = 0
        self.samples = 0
        self.trained = 0
        self.evaluated = 0
        self.grad_enabled = False
        self.sequence = -1
        self.sampler = 0
        self.orders: list[tuple[int, int | None]] = []
        self.drawn: dict[str, None] = {}
        self.open = True
        self.exhausted = False
        self.ended_at = 0.0
        self.looked = 0
        self.memory: set[Any] = set()
        self.values = array("q")
        self.order = 0
        self.head: tuple[int, ...] = ()
        self.ascending = True
        self.last = -(1 << 63)
        self.look_at = 0 if fingerprints is not None else LOOK_EVERY
        self.write_at = time.perf_counter_ns() + int(place.interval_s * 1e9)

    def look(self, recorder: Recorder, batch: Any, now: int) -> None:
        """Count what was delivered; fingerprint this batch; write where it is time to."""
        self.looked, self.memory = self.batches, memories(batch)
        _looked[self.loader] = self
        if self.fingerprints is not None:
            given = self.given[self.batches - self.counted - 1 :][:1]
            if not self.fingerprints.take(self.batches - 1, given[0] if given else None, batch):
                self.fingerprints.write(recorder, self.loader, self.number)
                self.fingerprints = None
        self.count()
        if len(self.values) >= CHUNK or now >= self.write_at:
            self.write(recorder)
            interval = self.place.interval_s = min(2 * self.place.interval_s, SLOWEST_WRITE_S)
            self.write_at = now + int(interval * 1e9)
        self.look_at = self.batches + (1 if self.fingerprints is not None else LOOK_EVERY)

    def count(self) -> None:
        """Copy the indices of delivered batches and let go of their lists."""
        delivered = self.batches - self.counted
        chunk = self.given[:delivered]
        del self.given[:delivered]
        self.counted = self.batches
        if set(map(type, chunk)) == {list}:
            flat = list(itertools.chain.from_iterable(chunk))
        else:
            flat = [i for g in chunk for i in (g if isinstance(g, (list, tuple, range)) else [g])]
        self.samples += len(flat)
        try:
            self.values.fromlist(flat)
        except (TypeError, OverflowError):
            self.values.extend([k for i in flat if (k := key(i)) is not None])

    def write(self, recorder: Recorder) -> None:
        indices, sampled = self._take()
        if self.fingerprints is not None:
            self.fingerprints.write(recorder, self.loader, self.number)
        if not self.silent:
            recorder.emit(
                IndicesRead(
                    at=time.monotonic(),
                    loader=self.loader,
                    epoch=self.number,
                    batches=self.batches,
                    samples=self.samples,
                    backwards=self.trained,
                    indices=indices,
                    sampled=sampled,
                )
            )

    def close(self, recorder: Recorder, collectives: int, sharded: bool) -> None:
        _looked.pop(self.loader, None)
        self.count()
        indices, sampled = self._take()
        if self.silent:
            return
        if self.fingerprints is not None:
            self.fingerprints.write(recorder, self.loader, self.number)
        recorder.emit(
            EpochEnded(
                at=self.ended_at or time.monotonic(),
                loader=self.loader,
                epoch=self.number,
                batches=self.batches,
                samples=self.samples,
                backwards=self.trained,
                exhausted=self.exhausted,
                grad_enabled=self.grad_enabled,
                indices=indices,
                sampled=sampled,
                evaluated=self.evaluated,
                order=self.order,
                head=self.head,
                ascending=self.ascending,
                collectives=collectives,
                sharded=sharded,
                drawn=tuple(self.drawn),
                again=self._again(),
                workers=self.notes.read() if self.notes is not None else (),
            )
        )

    def _again(self) -> int:
        """Orders that went by the same number as the one before, as far as they were delivered."""
        begun = [number for at, number in self.orders if at < self.batches]
        return sum(a == b is not None for a, b in itertools.pairwise(begun))

    def _take(self) -> tuple[str, int]:
        """The indices counted since the last call, packed, and one in how many they are."""
        values, self.values = self.values, array("q")
        if not values:
            return "", 1
        if len(self.head) < HEAD:
            self.head = (*self.head, *values[: HEAD - len(self.head)])
        self.order = zlib.crc32(values, self.order)
        self.ascending = self.ascending and values[0] >= self.last and _rises(values)
        self.last = values[-1]
        halved = halvings(self.place.indices, CAP)
        self.place.indices += len(values)
        chosen = values if not halved else _thinned(values, halved)
        return pack_ascending(chosen) if not self.silent else "", 1 << halved


_looked: dict[int, Reading] = {}
"""By loader, its iteration, while that goes on."""


def delivered_by(memory: set[Any]) -> tuple[int, ...]:
    """The loaders whose last batch lies in this memory, as far as batches are looked at."""
    return tuple(
        number
        for number, reading in _looked.items()
        if reading.open and reading.looked == reading.batches and reading.memory & memory
    )


def _rises(values: array[int]) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return all(a <= b for a, b in itertools.pairwise(values))
    found = numpy.frombuffer(values, dtype=numpy.int64)
    return bool((found[1:] >= found[:-1]).all())


def _thinned(values: array[int], halved: int) -> array[int]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return array("q", [i for i in values if kept(i, halved)])
    found = numpy.frombuffer(values, dtype=numpy.int64)
    low = found.astype(numpy.uint32) * numpy.uint32(SCATTER)
    return array("q", found[(low >> numpy.uint32(32 - halved)) == 0].tobytes())
