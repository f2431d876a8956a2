"""A loader and the ranks that ought to divide its data, with all that is known of what they read.

Checks and rules ask this; it computes each answer once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...events import Payload
from ...run import Rank, Run
from .content import Agreement
from .datasets import differences, judged
from .epoch_audit import Audit, by_chance
from .forward_inputs import sharded_inputs
from .loaders import Loader, Reader, batch_size, loaders
from .sharing_ranks import divisions

UNEVEN_BATCHES = 4
"""Where a batch sampler makes batches of several sizes, the largest one over the mean."""


@dataclass(eq=False)
class Division:
    """What these ranks read of one loader.

    Attributes:
        audits: of its epochs, in order.
    """

    run: Run
    loader: Loader
    ranks: frozenset[int]
    audits: tuple[Audit, ...]

    @cached_property
    def everyone(self) -> list[Reader]:
        """Readers of the ranks that got a batch."""
        return self.loader.of(self.ranks)

    @cached_property
    def readers(self) -> list[Reader]:
        """Those of them whose indices are on record."""
        return [r for r in self.everyone if any(e.indexed for e in r.epochs)]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Their ranks."""
        return tuple(r.rank.rank for r in self.readers)

    @cached_property
    def distributed(self) -> bool:
        return all(r.seen.distributed for r in self.readers)

    @cached_property
    def differing(self) -> list[tuple[Payload, Payload]]:
        return differences(self.readers)

    @cached_property
    def samples(self) -> Agreement:
        """How the samples compare at equal indices."""
        return judged(self.readers)

    @cached_property
    def batch(self) -> int:
        return batch_size(self.readers)

    @cached_property
    def worst(self) -> Audit:
        """The epoch in which ranks read most of the same samples."""
        return max(self.audits, key=lambda a: len(a.shared))

    @cached_property
    def skewed(self) -> Audit | None:
        """The first epoch in which ranks with other seeds or epoch numbers share samples."""
        return next((a for a in self.audits if _skewed(a) and a.shared), None)

    @cached_property
    def padding(self) -> int:
        """How many samples the sampler adds to make the shares equally long; one per rank where
        that is unknown."""
        seen = self.readers[0].seen
        if 0 < 2 * seen.total_size <= seen.length:  # it divides batches
            return (len(self.readers) - 1) * self.batch * UNEVEN_BATCHES
        return max(0, seen.total_size - seen.length) if seen.total_size > 0 else len(self.readers)

    @cached_property
    def takes_rows(self) -> bool:
        """Whether each rank takes its rows of the same batches."""
        return sharded_inputs(self.run, self.readers)

    @cached_property
    def shared_by_epoch(self) -> list[int]:
        """How many samples several ranks read in each epoch, where that changes although the shares
        keep their sizes: the ranks then shuffle differently. Empty where it does not change, as
        where all ranks take wrong positions of one order."""
        whole = [a for a in self.audits if a.complete]
        sizes = {tuple(e.samples for _, e in sorted(a.epochs.items())) for a in whole}
        counts = [len(a.shared) for a in whole]
        return counts[:8] if len(sizes) == 1 and len(set(counts)) > 1 else []

    def of(self, ranks: Collection[int]) -> Division:
        """The same of some of the ranks only; epochs in which fewer than two took part are left
        out."""
        audits = tuple(a for audit in self.audits if (a := audit.of(ranks)) is not None)
        return Division(self.run, self.loader, frozenset(ranks), audits)


@lru_cache(maxsize=1)
def divided_loaders(run: Run) -> tuple[Division, ...]:
    """Every loader with indices and every set of ranks that ought to divide its data."""
    found = (
        Division(run, loader, ranks, tuple(_audits(loader.of(ranks))))
        for loader in loaders(run)
        for ranks in divisions(run, loader)
    )
    return tuple(division for division in found if division.audits)


def _audits(readers: list[Reader]) -> list[Audit]:
    found = []
    for number in range(max(len(r.epochs) for r in readers)):
        epochs = {r.rank.rank: e for r in readers if (e := r.epoch(number)) and e.indexed}
        if len(epochs) > 1:
            length = max(e.seen.length for e in epochs.values())
            found.append(Audit(max(e.number for e in epochs.values()), length, epochs))
    return found


def _skewed(audit: Audit) -> bool:
    """Whether the ranks' samplers have different seeds or epoch numbers in the same epoch."""
    if len({e.began.step for e in audit.epochs.values()}) > 1:
        return False  # not the same epoch of the training
    if len({(e.began.seed, e.began.sampler_epoch) for e in audit.epochs.values()}) == 1:
        return False
    seen = [e.seen for e in audit.epochs.values()]
    own = all(s.own_order and s.shuffle is None for s in seen) and not by_chance(audit)
    return own or any(s.shuffle for s in seen)


class Shares(NamedTuple):
    """What one rank trained on: complete epochs of a loader that is divided between ranks.

    Attributes:
        number: of the epochs; `batches` of this rank in each; `ranks` that share the data.
        undivided: the fewest and the most batches that all of the data would give one process.
    """

    number: int
    batches: int
    ranks: int
    undivided: tuple[int, int]


def epochs_of_shares(run: Run, rank: Rank) -> Shares | None:
    """The epochs of the only loader that this rank trained on; None where they were not all
    complete, or are not known."""
    reader = _only_trained(run, rank)
    if reader is None:
        return None
    seen, epochs = reader.seen, reader.epochs
    size = batch_size([reader])
    if min(seen.length, seen.batches, size) < 1:
        return None
    ranks = seen.replicas
    if ranks < 2:  # a sampler that does not say among how many ranks it divides the batches
        ranks = run.world_size if seen.batches == seen.length // size // run.world_size else 0
    if ranks < 2 or not all(epoch.whole for epoch in epochs):
        return None
    undivided = seen.length // size, -(-seen.length // size)
    return Shares(epochs[-1].number + 1, seen.batches, ranks, undivided)


def batches_of_whole(run: Run, rank: Rank) -> int:
    """The batches of the only loader that this rank trained on, in all epochs, where each has all
    of the data; 0 where that is not so, or not known."""
    reader = _only_trained(run, rank)
    if reader is None or min(reader.seen.length, reader.seen.batches) < 1:
        return 0
    length, size, batches = reader.seen.length, batch_size([reader]), reader.seen.batches
    whole = batches in (length // size, -(-length // size))
    return batches * (reader.epochs[-1].number + 1) if whole else 0


def _only_trained(run: Run, rank: Rank) -> Reader | None:
    mine = [each.readers[rank.rank] for each in loaders(run) if rank.rank in each.readers]
    training = [reader for reader in mine if reader.trains]
    return training[0] if len(training) == 1 else None
