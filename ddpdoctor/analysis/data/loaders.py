"""What each loader delivered to each rank, joined across ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ...events import (
    ContentRead,
    EpochBegan,
    EpochEnded,
    IndicesRead,
    LoaderSeen,
    OptimizerSeen,
    RowsChosen,
    RowsRead,
    StepDone,
    Wrapped,
)
from ...events.pack import unpack_ascending
from ...run import Location, Rank, Run
from .thresholds import FEWEST_TO_ORDER

if TYPE_CHECKING:
    import numpy as np

SCATTER = 2654435761
"""Multiplier of the hash by which both the probe and `in_sample` choose indices."""


Index = TypeVar("Index", int, "np.ndarray")


def in_sample(index: Index, sampled: int) -> Index:
    """Whether a sampling of one in `sampled` (a power of two) keeps this index, or each of some."""
    kept: Index = (index * SCATTER & 0xFFFFFFFF) >> (33 - sampled.bit_length()) == 0
    return kept


Line = tuple[str, int] | None
"""File and number of a line, None where it is unknown."""


E = TypeVar("E", IndicesRead, ContentRead, RowsRead, RowsChosen)


class Turn(NamedTuple):
    """A loader's position among the loaders of the same lines and use (training or not), which is
    the same on every rank.

    Attributes:
        before: how many of them came before it.
        step: optimizer steps taken when it was first iterated.
    """

    made_at: Line
    loop_at: Line
    trains: bool
    before: int
    step: int


@dataclass(eq=False)
class Epoch:
    """One iteration of one rank over a loader.

    Attributes:
        number: counted from 0, over all loaders that the same line made anew for each epoch.
        parts: records of the indices delivered before the end of the epoch.
        chosen: the last record of rows that were chosen by their digests.
        steps: optimizer steps taken while it went on: about its batches, where its end is not on
            record, unless a program takes several steps for a batch.
    """

    number: int
    seen: LoaderSeen
    began: EpochBegan
    ended: EpochEnded | None
    parts: list[IndicesRead]
    content: list[ContentRead]
    rows: list[RowsRead]
    steps: int = 0
    chosen: RowsChosen | None = None

    @property
    def batches(self) -> int:
        if self.ended is not None:
            return self.ended.batches
        # A program may take several steps for a batch: it has no more batches than the loader.
        steps = min(self.steps, self.seen.batches) if self.seen.batches > 0 else self.steps
        return max(self.parts[-1].batches if self.parts else 0, steps)

    @property
    def samples(self) -> int:
        last = self.ended or (self.parts[-1] if self.parts else None)
        return last.samples if last else 0

    @property
    def trained(self) -> int:
        """Batches that a backward or an optimizer step followed."""
        if self.ended is not None:
            return self.ended.backwards
        return max(self.parts[-1].backwards if self.parts else 0, self.steps)

    @property
    def exhausted(self) -> bool:
        return self.ended is not None and self.ended.exhausted

    @property
    def whole(self) -> bool:
        """Whether every batch was taken: who counts them may never ask for one more (Lightning)."""
        ended = self.ended
        return ended is not None and (ended.exhausted or ended.batches >= self.began.batches > 0)

    @property
    def sampled(self) -> int:
        """1 where every index is on record, n where one in n is."""
        ended = self.ended.sampled if self.ended else 1
        return max([ended, *(p.sampled for p in self.parts)])

    @property
    def indexed(self) -> bool:
        """Whether indices are on record."""
        return any(p.indices for p in (*self.parts, *((self.ended,) if self.ended else ())))

    @property
    def read(self) -> np.ndarray:
        """The indices delivered: int64, ascending in each record of them."""
        return _unpacked([*self.parts, *([self.ended] if self.ended else ())])

    @property
    def indices(self) -> list[int]:
        found: list[int] = self.read.tolist()
        return found

    def until(self, samples: int) -> list[int]:
        """The indices delivered first, as far as a record ends at no more than so many samples."""
        found: list[int] = _unpacked([p for p in self.parts if p.samples <= samples]).tolist()
        return found

    def of_every(self, sampled: int) -> np.ndarray:
        """The indices that a sampling of one in `sampled` keeps, int64."""
        read = self.read
        return read if sampled == 1 else read[in_sample(read, sampled)]


def _unpacked(records: Sequence[IndicesRead | EpochEnded]) -> np.ndarray:
    import numpy as np

    try:
        return np.concatenate([np.empty(0, "q"), *(unpack_ascending(r.indices) for r in records)])
    except ValueError:  # a damaged record
        return np.empty(0, "q")


@dataclass(eq=False)
class Reader:
    """What one rank read through one loader, or through loaders that the same line made anew for
    each epoch.

    Attributes:
        turn: of the loader, or of the first one.
        earlier: epochs over the same data before, while it was sharded in another way.
        trains_too: the rank also trains with this loader, in iterations that are not these.
    """

    rank: Rank
    seen: LoaderSeen
    epochs: list[Epoch] = field(default_factory=list)
    turn: Turn = field(default=Turn(None, None, False, 0, 0))
    earlier: list[Epoch] = field(default_factory=list)
    trains_too: bool = False

    @property
    def looked(self) -> list[Epoch]:
        """All epochs in which samples of this data may have been examined."""
        return [*self.earlier, *self.epochs]

    @property
    def trains(self) -> bool:
        return any(e.trained for e in self.epochs)

    def feeds(self, optimizer: int) -> bool:
        """Whether that optimizer took steps while the loader was iterated."""
        steps = [e.at for e in self.rank.of(StepDone) if e.optimizer == optimizer]
        spans = [(e.began.at, e.ended.at if e.ended else inf) for e in self.epochs]
        return any(begin <= at <= end for begin, end in spans for at in steps)

    @property
    def training_ends(self) -> list[EpochEnded]:
        """The ends of its training epochs, as far as they are on record."""
        return [e.ended for e in self.epochs if e.ended is not None and e.ended.backwards]

    @property
    def read(self) -> bool:
        return any(e.batches for e in self.epochs)

    @property
    def before_models(self) -> bool:
        """Whether the last epoch ended before a model was wrapped or an optimizer stepped."""
        known = [e.at for e in (*self.rank.of(Wrapped), *self.rank.of(OptimizerSeen))]
        ended = self.epochs[-1].ended
        return ended is not None and ended.grad_enabled and ended.at < min(known, default=0.0)

    def epoch(self, number: int) -> Epoch | None:
        return self.epochs[number] if number < len(self.epochs) else None

    @property
    def made_at(self) -> Location | None:
        return self.rank.location(self.seen.site) or self.rank.location(self.seen.loop_site)

    @property
    def sampler_at(self) -> Location | None:
        return self.rank.location(self.seen.sampler_site) or self.made_at

    @property
    def loop_at(self) -> Location | None:
        return self.rank.location(self.seen.loop_site)

    def split(self, names: Container[str]) -> Location | None:
        """The line that makes the first `Subset` whose indices are among these (`Payload.name`)."""
        sites = (
            e.site for n, e in enumerate(self.seen.layers) if "dataset." * n + "indices" in names
        )
        return self.rank.location(next(sites, -1))


@dataclass(eq=False)
class Loader:
    """One loader of the program, on all ranks that iterate it."""

    readers: dict[int, Reader]

    @property
    def first(self) -> Reader:
        return self.readers[min(self.readers)]

    @property
    def trains(self) -> bool:
        return any(r.trains for r in self.readers.values())

    @property
    def used(self) -> bool:
        """Whether it was read far enough to tell training from evaluation."""
        epochs = [e for r in self.readers.values() for e in r.epochs]
        evaluated = any(e.ended is not None and e.ended.evaluated for e in epochs)
        return self.trains or evaluated or any(e.exhausted or e.batches > 1 for e in epochs)

    @property
    def samples_read(self) -> dict[int, int]:
        """By rank, how many samples it read in its longest iteration."""
        return {n: max((e.samples for e in r.epochs), default=0) for n, r in self.readers.items()}

    @property
    def label(self) -> str:
        place = self.first.made_at
        return str(place) if place else f"loader {self.first.seen.loader}"

    def of(self, ranks: Iterable[int], *, begun: bool = False) -> list[Reader]:
        """Readers of those of these ranks that got a batch, as far as that is on record.

        Args:
            begun: include ranks that are within an iteration.
        """
        found = [self.readers[r] for r in sorted(ranks) if r in self.readers]
        return [r for r in found if r.read or (begun and r.epochs[-1].ended is None)]


def in_order(ended: EpochEnded) -> bool:
    """Whether the indices never fell, except perhaps for padding at the end."""
    head = ended.head
    padded = len(head) >= FEWEST_TO_ORDER and list(head) == sorted(head) and ended.falls <= 1
    return ended.ascending or padded


def same_order(before: EpochEnded, now: EpochEnded, fewest: int) -> bool:
    """Whether two epochs had the same order. Where one was left early, their first indices decide,
    if there are at least `fewest`."""
    if before.samples == now.samples:
        return before.order == now.order
    count = min(len(before.head), len(now.head))
    return count >= fewest and before.head[:count] == now.head[:count]


@lru_cache(maxsize=1)
def loaders(run: Run) -> tuple[Loader, ...]:
    """All loaders of the run. The lines that make and iterate a loader identify it across ranks,
    not its number: not every rank iterates every loader."""
    by_place: dict[tuple[Line, Line, bool], dict[int, list[Reader]]] = {}
    for rank, readers in _remade(run).items():
        for reader in readers:
            place = _line(reader.made_at), _line(reader.loop_at), reader.trains
            by_place.setdefault(place, {}).setdefault(rank, []).append(reader)
    by_key = {
        (*place, key): readers
        for place, by_rank in by_place.items()
        for key, readers in _paired(by_rank).items()
    }
    return tuple(Loader(readers) for readers in _joined(by_key))


def _paired(by_rank: dict[int, list[Reader]]) -> dict[int, dict[int, Reader]]:
    """The loaders that one line makes and one iterates, joined across ranks: in the order in which
    each rank makes them, or in which it first iterates them where more of them match then."""
    made: dict[int, dict[int, Reader]] = defaultdict(dict)
    iterated: dict[int, dict[int, Reader]] = defaultdict(dict)
    for rank, readers in by_rank.items():
        for n, reader in enumerate(readers):
            iterated[n][rank] = reader
            made[reader.seen.made][rank] = reader
    unique = sum(map(len, made.values())) == sum(map(len, iterated.values()))
    return made if unique and _matches(made) >= _matches(iterated) else iterated


def _matches(paired: dict[int, dict[int, Reader]]) -> int:
    """How many loaders have equal data on two ranks that follow each other."""
    found = 0
    for readers in paired.values():
        seen = [
            (r.seen.dataset, r.seen.length, {(p.name, p.order) for p in r.seen.payloads})
            for r in readers.values()
        ]
        found += sum(one == other for one, other in pairwise(seen))
    return found


def _line(spot: Location | None) -> Line:
    return (spot.file, spot.line) if spot is not None else None


def _joined(
    keyed: dict[tuple[Line, Line, bool, int], dict[int, Reader]],
) -> list[dict[int, Reader]]:
    """One entry per loader. Ranks that make theirs at different lines but iterate it at the same
    line share a loader, too."""
    found: list[tuple[Line, dict[int, Reader]]] = []
    for (_, loop, *_), readers in keyed.items():
        kind = next(iter(readers.values())).seen
        for other_loop, other in found:
            same = next(iter(other.values())).seen
            disjoint = not other.keys() & readers.keys()
            if (
                loop is not None
                and loop == other_loop
                and disjoint
                and same.iterable == kind.iterable
            ):
                other.update(readers)
                break
        else:
            found.append((loop, dict(readers)))
    return [dict(sorted(readers.items())) for _, readers in found]


def _readers(rank: Rank) -> list[Reader]:
    """The rank's loaders, one reader each, in order of first iteration."""
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    parts, content = _by_epoch(rank, IndicesRead), _by_epoch(rank, ContentRead)
    rows, chosen = _by_epoch(rank, RowsRead), _by_epoch(rank, RowsChosen)
    seen = {e.loader: e for e in rank.of(LoaderSeen)}
    readers: dict[int, Reader] = {n: Reader(rank, e) for n, e in seen.items()}
    for began in rank.of(EpochBegan):
        key = began.loader, began.epoch
        reader = readers.get(began.loader)
        if reader is None:
            continue
        ended = ends.get(key)
        epoch = Epoch(0, reader.seen, began, ended, parts[key], content[key], rows[key])
        epoch.chosen = chosen[key][-1] if key in chosen else None
        epoch.steps = _steps_within(rank, began.at, inf if ended is None else ended.at)
        reader.epochs.append(epoch)
    parts_of_use = [part for reader in readers.values() for part in _by_use(reader)]
    for reader in parts_of_use:
        reader.epochs = _without_peeks(reader.epochs)
    found = sorted((r for r in parts_of_use if r.epochs), key=lambda r: r.epochs[0].began.at)
    nth: dict[tuple[Line, Line, bool], int] = defaultdict(int)
    for reader in found:
        kind = _line(reader.made_at), _line(reader.loop_at), reader.trains
        reader.turn = Turn(*kind, nth[kind], reader.epochs[0].began.step)
        nth[kind] += 1
    return found


def _by_use(reader: Reader) -> list[Reader]:
    """A loader that is iterated both to train and for something else, an evaluation say, counts as
    two: not every rank need do the other thing, and those iterations are no epochs of the
    training."""
    trained = {e.began.site for e in reader.epochs if e.trained}
    others = [
        e
        for e in reader.epochs
        if e.ended is not None
        and not e.trained
        and (e.ended.evaluated or not e.ended.grad_enabled or e.began.site not in trained)
    ]
    if not trained or not others:
        return [reader]
    seen = msgspec.structs.replace(reader.seen, loop_site=others[0].began.site)
    training = [e for e in reader.epochs if e not in others]
    return [replace(reader, epochs=training), Reader(reader.rank, seen, others, trains_too=True)]


def _steps_within(rank: Rank, began: float, ended: float) -> int:
    steps = rank.of(StepDone)
    first = bisect_right(steps, began, key=lambda s: s.at)
    return sum(s.count for s in steps[first : bisect_right(steps, ended, key=lambda s: s.at)])


def _by_epoch(rank: Rank, kind: type[E]) -> dict[tuple[int, int], list[E]]:
    """The rank's records of one kind, by loader and epoch."""
    found: dict[tuple[int, int], list[E]] = defaultdict(list)
    for event in rank.of(kind):
        found[event.loader, event.epoch].append(event)
    return found


def _without_peeks(epochs: list[Epoch]) -> list[Epoch]:
    """The epochs without those that only took one batch (to see its shape), if others took more."""
    real = [e for e in epochs if e.batches > 1 or e.exhausted or e.ended is None]
    return real if any(e.batches > 1 for e in real) else epochs


def _remade(run: Run) -> dict[int, list[Reader]]:
    """The readers of each rank, with loaders that are made anew for each epoch joined. A loader
    that is separate on some rank is separate on all: its data may be new on that rank only."""
    made = {number: _readers(rank) for number, rank in run.everyone.items()}
    separate = {reader.turn for readers in made.values() for reader in _follow(readers, set())}
    return {number: _follow(readers, separate) for number, readers in made.items()}


def _follow(readers: list[Reader], separate: set[Turn]) -> list[Reader]:
    """Join loaders that the same line makes one after the other, over the same data with the same
    sharding, within the training of one model; except those in `separate`."""
    joined: list[Reader] = []
    for reader in readers:
        before = [r for r in joined if _same_loader(r, reader) and not _restarted(r, reader)]
        same = [r for r in before if _equal_sharding(r.seen, reader.seen)]
        if same and reader.turn not in separate:
            same[-1].epochs += reader.epochs
        else:
            earlier = before[-1].looked if before else []
            joined.append(replace(reader, epochs=list(reader.epochs), earlier=earlier))
    for reader in joined:
        for number, epoch in enumerate(reader.epochs, len(reader.earlier)):
            epoch.number = number
    return joined


def _same_loader(old: Reader, new: Reader) -> bool:
    """Whether the same line made both, one after the other, for the same data and use."""
    a, b = old.seen, new.seen
    equal = (a.site, a.loop_site, a.dataset, a.length) == (b.site, b.loop_site, b.dataset, b.length)
    orders = [[(p.name, p.order) for p in s.payloads] for s in (a, b)]
    follows = old.epochs[-1].began.at < new.epochs[0].began.at and old.epochs[-1].ended is not None
    same_use = old.trains == new.trains
    return (
        a.site >= 0
        and equal
        and follows
        and same_use
        and (orders[0] == orders[1] or not orders[0] or not orders[1])
    )


def _equal_sharding(a: LoaderSeen, b: LoaderSeen) -> bool:
    return (a.sampler, a.replicas, a.sampler_rank) == (b.sampler, b.replicas, b.sampler_rank)


def _restarted(old: Reader, new: Reader) -> bool:
    """Whether another training began between them: a model was wrapped, or a new optimizer
    stepped."""
    rank = old.rank
    since, until = old.epochs[-1].began.at, new.epochs[0].began.at
    made = [e.at for e in rank.of(Wrapped)] + [e.at for e in rank.of(OptimizerSeen)][1:]
    return any(since < at < until for at in made)


def batch_size(readers: Sequence[Reader]) -> int:
    """The largest batch size, computed from what was delivered where a batch sampler decides it."""
    reported = [r.seen.batch_size for r in readers if r.seen.batch_size]
    found = (-(-e.samples // e.batches) for r in readers for e in r.epochs if e.batches)
    return max(reported) if reported else max(found, default=1)
