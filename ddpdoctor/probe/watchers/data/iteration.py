"""Which samples did one iteration over a loader deliver, how many, in which order?

Indices are recorded exactly up to a cap; beyond it one in k, chosen by a hash, so that all ranks
keep the same subset. k depends only on how much was read before: ranks that read equally record
equally.
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
from ...recording import rng_state
from ...recording.index_sample import SCATTER, halvings, kept, key
from ...recording.recorder import Recorder
from ...tensors.fingerprints import Fingerprints
from ...tensors.sample_digests import latest_batch, memories
from .own_generators import OwnDraws
from .worker_rng import Notes

CAP = 1 << 18
"""Indices recorded in full per line that makes loaders; after that one in two, one in four, ..."""

EPOCHS_IN_FULL = 256
"""Epochs recorded one by one per line that makes loaders; then every second, every fourth..."""

CHUNK = 32768
"""Indices kept in memory before they are written."""

LOOK_EVERY = 64
"""Batches after which the indices are copied out of their lists: copying many at once is cheaper,
and the lists must not pile up."""

HEAD = 16
"""First indices of an epoch that are recorded in order."""

RANDOM_BATCHES = range(1, 4)
"""Batches around which the random generators are compared; the first one seeds samplers."""

FIRST_WRITE_S, SLOWEST_WRITE_S = 1.0, 60.0


class LoaderLine:
    """What all loaders made at one line have delivered so far.

    Attributes:
        share: batches of this rank in one pass over the data, if they go on for more: what they
            deliver until then is recorded by itself. 0 if unknown.
    """

    def __init__(self) -> None:
        self.loaders = 0
        self.epochs = 0
        self.indices = 0
        self.share = 0
        self.interval_s = FIRST_WRITE_S


class Iteration:
    """One iteration over a loader, while it goes on.

    Attributes:
        loader, number: numbers of the loader and of this epoch of it.
        silent: it is only counted, not recorded.
        fingerprints: of samples; None if they are not taken (any more).
        watch_random: compare the random generators around the next batches.
        notes: what worker processes write down of their generators.
        given: lists of indices that the sampler has yielded and that are not counted yet; with
            workers these are ahead of the batches delivered.
        counted: batches whose indices are counted.
        batches: batches delivered to the loop; `trained` of them were followed by a backward or a
            step, `evaluated` by a forward without training.
        sequence: torch's count of collectives when it began.
        sampler: id of the sampler that chooses the samples.
        orders: for each order that this sampler began, the number of the batch before which it did
            and its `epoch` (None if the program ever called `set_epoch`).
        drawn: names of generators that loading advances.
        own: likewise the generators that the data set keeps; None for an iterable one.
        order, head, falls: checksum of all indices in order, the first ones, and how often one is
            lower than the one before.
        look_at, write_at: number of batches and time at which to examine a batch or write next.
        looked, memory: number of batches when one was examined last, and the memory of that one.
    """

    def __init__(
        self,
        loader: int,
        number: int,
        line: LoaderLine,
        fingerprints: Fingerprints | None,
        *,
        silent: bool = False,
    ) -> None:
        self.loader = loader
        self.number = number
        self.line = line
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
        self.own: OwnDraws | None = None
        self.open = True
        self.exhausted = False
        self.ended_at = 0.0
        self.looked = 0
        self.memory: set[Any] = set()
        self.values = array("q")
        self.order = 0
        self.head: tuple[int, ...] = ()
        self.falls = 0
        self.last = -(1 << 63)
        self.look_at = 0
        if fingerprints is None:
            self.look_at = min(LOOK_EVERY, line.share or LOOK_EVERY)
        self.write_at = time.perf_counter_ns() + int(line.interval_s * 1e9)

    def examine(self, recorder: Recorder, batch: Any, now: int) -> None:
        """Examine the batch just delivered: fingerprint it, count indices, write if it is time."""
        self.looked, self.memory = self.batches, memories(batch)
        latest_batch.take(batch)
        _looked[self.loader] = self
        if self.fingerprints is not None:
            given = self.given[self.batches - self.counted - 1 :][:1]
            if not self.fingerprints.take(self.batches - 1, given[0] if given else None, batch):
                self.fingerprints.write(recorder, self.loader, self.number)
                self.fingerprints = None
        self.count()
        if self.batches == self.line.share:
            self.write(recorder)
        elif len(self.values) >= CHUNK or now >= self.write_at:
            self.write(recorder)
            interval = self.line.interval_s = min(2 * self.line.interval_s, SLOWEST_WRITE_S)
            self.write_at = now + int(interval * 1e9)
        self.look_at = self.batches + (1 if self.fingerprints is not None else LOOK_EVERY)
        if self.batches < self.line.share < self.look_at:
            self.look_at = self.line.share

    def count(self) -> None:
        """Copy the indices of delivered batches out of their lists and drop these."""
        delivered = self.batches - self.counted
        chunk = self.given[:delivered]
        del self.given[:delivered]
        self.counted = self.batches
        if set(map(type, chunk)) == {list}:
            flat = list(itertools.chain.from_iterable(chunk))
        else:
            flat = [i for g in chunk for i in (g if isinstance(g, (list, tuple, range)) else [g])]
        if any(type(index) is list for index in flat):  # one index stands for a group of samples
            flat = [i for g in flat for i in (g if type(g) is list else [g])]
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
                ascending=not self.falls,
                falls=self.falls,
                collectives=collectives,
                sharded=sharded,
                drawn=tuple(self.drawn),
                again=self._again(),
                kept=self.own.states if self.own is not None else {},
                workers=self.notes.read() if self.notes is not None else (),
            )
        )

    def generators(self, recorder: Recorder) -> Any:
        """The positions of the global random generators before a batch around which they are
        compared; None for other batches."""
        if self.batches not in RANDOM_BATCHES:
            self.watch_random = self.batches < RANDOM_BATCHES.start
            return None
        try:
            if self.own is not None:
                self.own.look()
            return rng_state.positions()
        except Exception as error:
            self.watch_random = False
            recorder.trouble("data.random", error, "the random numbers that loading data draws")
            return None

    def _again(self) -> int:
        """Number of delivered orders that used the same epoch number as the order before."""
        begun = [number for at, number in self.orders if at < self.batches]
        return sum(a == b is not None for a, b in itertools.pairwise(begun))

    def _take(self) -> tuple[str, int]:
        """The indices counted since the last call, packed, and the k of "one in k"."""
        values, self.values = self.values, array("q")
        if not values:
            return "", 1
        if len(self.head) < HEAD:
            self.head = (*self.head, *values[: HEAD - len(self.head)])
        self.order = zlib.crc32(values, self.order)
        self.falls += (values[0] < self.last) + _falls(values)
        self.last = values[-1]
        halved = halvings(self.line.indices, CAP)
        self.line.indices += len(values)
        chosen = values if not halved else _thinned(values, halved)
        return pack_ascending(chosen) if not self.silent else "", 1 << halved


_looked: dict[int, Iteration] = {}
"""By loader number, the iteration whose batches were examined last, while it goes on."""


def delivered_by(memory: set[Any]) -> tuple[int, ...]:
    """Numbers of the loaders whose last batch was examined and lies in this memory."""
    return tuple(
        number
        for number, iteration in _looked.items()
        if iteration.open and iteration.looked == iteration.batches and iteration.memory & memory
    )


def _falls(values: array[int]) -> int:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return sum(a > b for a, b in itertools.pairwise(values))
    found = numpy.frombuffer(values, dtype=numpy.int64)
    return int((found[1:] < found[:-1]).sum())


def _thinned(values: array[int], halved: int) -> array[int]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return array("q", [i for i in values if kept(i, halved)])
    found = numpy.frombuffer(values, dtype=numpy.int64)
    low = found.astype(numpy.uint32) * numpy.uint32(SCATTER)
    return array("q", found[(low >> numpy.uint32(32 - halved)) == 0].tobytes())
