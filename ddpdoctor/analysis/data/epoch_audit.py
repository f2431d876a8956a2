"""Which indices of one epoch of one loader were read once, more than once, or never."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .loaders import Epoch, in_sample
from .tally import Tally
from .thresholds import FEWEST_REPEATS, REPEATS

LIKELY = 2.0
"""Times the square root of a number that is drawn: how far it is usually from the expected one."""

NAMED = 20
"""Indices named in a finding."""


@dataclass(eq=False)
class Audit:
    """What a set of ranks consumed in one epoch of a loader.

    Attributes:
        number: of the epoch.
        length: of the dataset.
        epochs: by rank.
    """

    number: int
    length: int
    epochs: dict[int, Epoch]

    @cached_property
    def sampled(self) -> int:
        """1 where every index was compared, n where one in n was."""
        return max(e.sampled for e in self.epochs.values())

    @cached_property
    def complete(self) -> bool:
        """Whether all ranks read the epoch to its end."""
        return all(e.whole for e in self.epochs.values())

    @cached_property
    def tally(self) -> Tally:
        return Tally(e.of_every(self.sampled) for e in self.epochs.values())

    def _read(self) -> Iterator[tuple[int, list[int]]]:
        """What each rank read. It is unpacked each time: of many ranks it is too much to keep."""
        return ((r, e.of_every(self.sampled).tolist()) for r, e in self.epochs.items())

    @property
    def delivered(self) -> int:
        """How many samples the ranks read, those read again included."""
        return self.tally.delivered

    @property
    def distinct(self) -> int:
        """How many different samples the ranks read."""
        return self.tally.distinct

    @property
    def repeated(self) -> dict[int, int]:
        """Indices that were read more than once, and how often."""
        return self.tally.repeated

    @property
    def shared(self) -> list[int]:
        """Indices that more than one rank read."""
        return self.tally.shared

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """The ranks that read what others read too, except those that share few indices."""
        shared = set(self.shared)
        counts = {r: len(shared.intersection(own)) for r, own in self._read()}
        most = max(counts.values())
        return tuple(sorted(r for r, count in counts.items() if 2 * count >= most))

    @property
    def once(self) -> int:
        return self.distinct - len(self.repeated)

    @cached_property
    def never(self) -> int:
        """How many of the compared indices of the dataset no rank read."""
        import numpy as np

        every = np.arange(self.length)
        known = in_sample(every, self.sampled).sum() if self.sampled > 1 else self.length
        return max(0, int(known) - self.distinct)

    def unseen(self) -> list[int]:
        """The first indices that no rank read; empty where not every index was compared."""
        return self.tally.unread(self.length, NAMED) if self.sampled == 1 else []

    @property
    def again_within(self) -> int:
        """How many indices one rank read more than once, summed over the ranks."""
        return self.tally.within.total() - self.tally.within[1]

    @cached_property
    def shared_at_first(self) -> tuple[list[int], int]:
        """Of samplers without an end: the indices that several ranks read among the first ones of
        each, and how many of these each rank read. They are within the first pass over the data, in
        which ranks that share one order read no index twice."""
        if not self.again_within or self.sampled > 1:
            return [], 0
        limit = self.length // len(self.epochs)
        first = [Counter(e.until(limit)) for e in self.epochs.values()]
        if any(not own or max(own.values()) > 1 for own in first):  # drawn with replacement
            return [], 0
        seen = Counter(i for own in first for i in own)
        return sorted(i for i, n in seen.items() if n > 1), min(map(len, first))

    @cached_property
    def times_within(self) -> int:
        """How often every rank reads each of its indices; 0 where that is not one number for nearly
        all of them."""
        counts = self.tally.within
        (times, most), *_ = counts.most_common(1) or [(0, 0)]
        return times if counts.total() - most <= len(self.epochs) else 0

    @cached_property
    def same_sets(self) -> bool:
        """Whether all ranks read the same indices, in any order."""
        read = self._read()
        first = Counter(next(read)[1])
        return all(len(own) == first.total() and Counter(own) == first for _, own in read)

    @cached_property
    def same_order(self) -> bool:
        """Whether all ranks read the same indices in the same order."""
        ends = [e.ended for e in self.epochs.values()]
        if any(e is None or not e.order for e in ends):
            return False
        return len({(e.order, e.samples) for e in ends if e is not None}) == 1

    @property
    def at(self) -> float:
        return min(e.began.at for e in self.epochs.values())

    def readers_of(self, index: int) -> list[int]:
        return [r for r, own in self._read() if index in own]

    def of(self, ranks: Collection[int]) -> Audit | None:
        """The audit of only some of the ranks; None where fewer than two of them took part."""
        epochs = {r: e for r, e in self.epochs.items() if r in ranks}
        length = max((e.seen.length for e in epochs.values()), default=0)
        return Audit(self.number, length, epochs) if len(epochs) > 1 else None

    def duplicates(self) -> list[dict[str, object]]:
        """Some of the repeated indices, as a table."""
        return [
            {"index": i, "times": n, "ranks": self.readers_of(i)}
            for i, n in list(self.repeated.items())[:NAMED]
        ]


# --- what is no overlap by mistake ---------------------------------------------------------------


def by_chance(audit: Audit) -> bool:
    """Whether ranks share samples as intended: drawn with replacement, or repeated on purpose."""
    if _deals_repeats(audit):
        return True
    drawn = any(e.seen.replacement for e in audit.epochs.values())
    return (drawn or (audit.again_within > 0 and not own_orders([audit]))) and not audit.same_order


def independent(audit: Audit) -> bool:
    """Whether as many samples are in no rank's share as if each rank drew its share by itself."""
    if not audit.complete or audit.again_within or not audit.length:
        return False
    expected = float(audit.length)
    for epoch in audit.epochs.values():
        expected *= 1 - epoch.samples / audit.length
    return abs(audit.never - expected) < LIKELY * math.sqrt(max(1.0, expected))


def _deals_repeats(audit: Audit) -> bool:
    """Whether the sampler repeats a part of the data instead of reading all of it once: each of
    these samples equally often, on other ranks each time (repeated augmentation)."""
    delivered = sum(e.samples for e in audit.epochs.values())
    if not audit.complete or delivered > audit.length or audit.again_within or not audit.distinct:
        return False
    (times, most), *_ = audit.tally.times.most_common(1)
    cut_at_the_end = audit.distinct - most
    if times == 1 or cut_at_the_end > len(audit.epochs):
        return False
    read = {frozenset(e.of_every(audit.sampled).tolist()) for e in audit.epochs.values()}
    return len(audit.epochs) == len(read)


def own_orders(made: Sequence[Audit]) -> bool:
    """Whether each rank takes its share of another order: together the ranks read as many samples
    as there are, about as many of them twice as never, but hardly any twice on one rank. If samples
    were drawn at random, or repeated in a common order, one in (ranks - 1) of the repeats would be
    on one rank."""
    orders = {tuple(e.ended.order for e in a.epochs.values() if e.ended): a for a in made}
    whole = [a for a in orders.values() if a.complete]
    expected = sum(len(a.shared) / (len(a.epochs) - 1) for a in whole)
    again = sum(a.again_within for a in whole)
    return (
        all(map(_repeats_what_it_lacks, whole))
        and (again <= expected / 4 if expected >= REPEATS else not again)
        and expected >= FEWEST_REPEATS
    )


def _repeats_what_it_lacks(audit: Audit) -> bool:
    shared, known = len(audit.shared), audit.never + audit.distinct
    size = abs(audit.delivered - known)
    return size <= known / 10 and shared / 2 <= audit.never <= 2 * shared


def pads(audit: Audit, batch: int) -> bool:
    """Whether everything was read, and repeats only fill up the last batch of each rank."""
    again = audit.delivered - audit.distinct
    whole = audit.complete and not audit.never and not audit.same_sets
    return whole and again < min(len(audit.epochs) * batch, audit.distinct // 2)


def partitioned(audit: Audit) -> bool:
    """Whether the ranks together read every sample of the dataset about once."""
    slack, shared = len(audit.epochs), len(audit.shared)
    few = shared <= slack and 2 * shared < audit.distinct
    return audit.complete and few and audit.never <= slack
