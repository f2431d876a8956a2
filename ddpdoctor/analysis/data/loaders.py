"""What each loader delivered to each rank, joined across ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ...events import (
    ContentRead,
    EpochBegan,
    EpochEnded,
    IndicesRead,
    LoaderSeen,
    OptimizerSeen,
    RowsRead,
    StepDone,
    Wrapped,
)
from ...events.pack import unpack_ascending
from ...run import Location, Rank, Run

SCATTER = 2654435761


class Turn(NamedTuple):
    """A loader's place among those of its lines that train, or of those that do not: the same on
    every rank.

    Attributes:
        before: how many there were; step: at which it began.
    """

    made_at: str
    loop_at: str
    trains: bool
    before: int
    step: int


@dataclass(eq=False)
class Epoch:
    """One iteration of one rank over a loader.

    Attributes:
        number: counted over all loaders that this one was remade as.
        steps: optimizer steps taken since it began, for an epoch without an end on record.
    """

    number: int
    seen: LoaderSeen
    began: EpochBegan
    ended: EpochEnded | None
    parts: list[IndicesRead]
    content: list[ContentRead]
    steps: int = 0
    rows: list[RowsRead] = field(default_factory=list)

    @property
    def batches(self) -> int:
        if self.ended is not None:
            return self.ended.batches
        return max(self.parts[-1].batches if self.parts else 0, self.steps)

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
    def sampled(self) -> int:
        """One index in how many is on record."""
        ended = self.ended.sampled if self.ended else 1
        return max([ended, *(p.sampled for p in self.parts)])

    @cached_property
    def indices(self) -> list[int]:
        texts = [p.indices for p in self.parts] + ([self.ended.indices] if self.ended else [])
        try:
            return [i for text in texts for i in unpack_ascending(text)]
        except ValueError:  # a damaged record
            return []

    def of_every(self, sampled: int) -> list[int]:
        """Those in the subset of one in `sampled`."""
        shift = 33 - sampled.bit_length()
        if sampled == 1:
            return self.indices
        return [i for i in self.indices if (i * SCATTER & 0xFFFFFFFF) >> shift == 0]


@dataclass(eq=False)
class Reader:
    """What one rank read through one loader, or through the same loader made again and again.

    Attributes:
        turn: of the loader, or of the first of them.
        earlier: epochs over the same data before that, while it was divided in another way.
    """

    rank: Rank
    seen: LoaderSeen
    epochs: list[Epoch] = field(default_factory=list)
    turn: Turn = field(default=Turn("", "", False, 0, 0))
    earlier: list[Epoch] = field(default_factory=list)

    @property
    def looked(self) -> list[Epoch]:
        """All in which samples of this data may have been looked at."""
        return [*self.earlier, *self.epochs]

    @property
    def trains(self) -> bool:
        return any(e.trained for e in self.epochs)

    @property
    def read(self) -> bool:
        return any(e.batches for e in self.epochs)

    @property
    def before_models(self) -> bool:
        """Whether it was over before there was a model, as far as it is known."""
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
        """Whether it got far enough to tell training from evaluation."""
        epochs = [e for r in self.readers.values() for e in r.epochs]
        evaluated = any(e.ended is not None and e.ended.evaluated for e in epochs)
        return self.trains or evaluated or any(e.exhausted or e.batches > 1 for e in epochs)

    @property
    def label(self) -> str:
        place = self.first.made_at
        return str(place) if place else f"loader {self.first.seen.loader}"

    def of(self, ranks: Iterable[int], *, begun: bool = False) -> list[Reader]:
        """Readers of these ranks that got any batch, as far as that is on record; with `begun`,
        also those that are in an iteration now."""
        found = [self.readers[r] for r in sorted(ranks) if r in self.readers]
        return [r for r in found if r.read or (begun and r.epochs[-1].ended is None)]


def in_order(ended: EpochEnded) -> bool:
    """The indices rose, but perhaps for what pads the end."""
    head = ended.head
    return ended.ascending or (len(head) >= 8 and list(head) == sorted(head))


@lru_cache(maxsize=1)
def loaders(run: Run) -> tuple[Loader, ...]:
    """All loaders of the run. The same loader on two ranks is told by the lines that make and
    iterate it, not by its number: not every rank iterates every loader."""
    by_key: dict[tuple[str, str, int], dict[int, Reader]] = defaultdict(dict)
    for rank, readers in _remade(run).items():
        nth: dict[tuple[str, str], int] = defaultdict(int)
        for reader in readers:
            place = (str(reader.made_at), str(reader.loop_at))
            by_key[(*place, nth[place])][rank] = reader
            nth[place] += 1
    return tuple(Loader(readers) for readers in _joined(by_key))


def _joined(keyed: dict[tuple[str, str, int], dict[int, Reader]]) -> list[dict[int, Reader]]:
    """Ranks that make their loader at different lines but iterate it at one share it too."""
    found: list[tuple[str, dict[int, Reader]]] = []
    for (_, loop, _), readers in keyed.items():
        kind = next(iter(readers.values())).seen
        for other_loop, other in found:
            same = next(iter(other.values())).seen
            apart = not other.keys() & readers.keys()
            if loop == other_loop != "None" and apart and same.iterable == kind.iterable:
                other.update(readers)
                break
        else:
            found.append((loop, dict(readers)))
    return [dict(sorted(readers.items())) for _, readers in found]


def _readers(rank: Rank) -> list[Reader]:
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    parts: dict[tuple[int, int], list[IndicesRead]] = defaultdict(list)
    content: dict[tuple[int, int], list[ContentRead]] = defaultdict(list)
    for part in rank.of(IndicesRead):
        parts[part.loader, part.epoch].append(part)
    for read in rank.of(ContentRead):
        content[read.loader, read.epoch].append(read)
    rows: dict[tuple[int, int], list[RowsRead]] = defaultdict(list)
    for row in rank.of(RowsRead):
        rows[row.loader, row.epoch].append(row)
    seen = {e.loader: e for e in rank.of(LoaderSeen)}
    readers: dict[int, Reader] = {n: Reader(rank, e) for n, e in seen.items()}
    for began in rank.of(EpochBegan):
        key = began.loader, began.epoch
        reader = readers.get(began.loader)
        if reader is None:
            continue
        ended = ends.get(key)
        epoch = Epoch(0, reader.seen, began, ended, parts[key], content[key])
        epoch.rows = rows[key]
        if ended is None:
            epoch.steps = sum(s.count for s in rank.of(StepDone) if s.at > began.at)
        reader.epochs.append(epoch)
    for reader in readers.values():
        reader.epochs = _without_peeks(reader.epochs)
    found = sorted((r for r in readers.values() if r.epochs), key=lambda r: r.epochs[0].began.at)
    nth: dict[tuple[str, str, bool], int] = defaultdict(int)
    for reader in found:
        kind = str(reader.made_at), str(reader.loop_at), reader.trains
        reader.turn = Turn(*kind, nth[kind], reader.epochs[0].began.step)
        nth[kind] += 1
    return found


def _without_peeks(epochs: list[Epoch]) -> list[Epoch]:
    """Leave out iterations that only took one batch, to look at its shape, beside real ones."""
    real = [e for e in epochs if e.batches > 1 or e.exhausted or e.ended is None]
    return real if any(e.batches > 1 for e in real) else epochs


def _remade(run: Run) -> dict[int, list[Reader]]:
    """Of each rank, with those joined that are made anew for every epoch. One that is another
    loader than those before on some rank is so on all: what it reads may only there be other data.
    """
    made = {number: _readers(rank) for number, rank in run.ranks.items()}
    apart = {reader.turn for readers in made.values() for reader in _follow(readers, set())}
    return {number: _follow(readers, apart) for number, readers in made.items()}


def _follow(readers: list[Reader], apart: set[Turn]) -> list[Reader]:
    """Join loaders that come one after the other at the same line, over the same data divided in
    the same way, within the training of one model; but for those in `apart`."""
    joined: list[Reader] = []
    for reader in readers:
        alike = [r for r in joined if _same_loader(r, reader) and not _restarted(r, reader)]
        same = [r for r in alike if _divided_alike(r.seen, reader.seen)]
        if same and reader.turn not in apart:
            same[-1].epochs += reader.epochs
        else:
            before = alike[-1].looked if alike else []
            joined.append(replace(reader, epochs=list(reader.epochs), earlier=before))
    for reader in joined:
        for number, epoch in enumerate(reader.epochs, len(reader.earlier)):
            epoch.number = number
    return joined


def _same_loader(old: Reader, new: Reader) -> bool:
    a, b = old.seen, new.seen
    alike = (a.site, a.loop_site, a.dataset, a.length) == (b.site, b.loop_site, b.dataset, b.length)
    orders = [[(p.name, p.order) for p in s.payloads] for s in (a, b)]
    follows = old.epochs[-1].began.at < new.epochs[0].began.at and old.epochs[-1].ended is not None
    same_use = old.trains == new.trains
    return (
        a.site >= 0
        and alike
        and follows
        and same_use
        and (orders[0] == orders[1] or not orders[0] or not orders[1])
    )


def _divided_alike(a: LoaderSeen, b: LoaderSeen) -> bool:
    return (a.sampler, a.replicas, a.sampler_rank) == (b.sampler, b.replicas, b.sampler_rank)


def _restarted(old: Reader, new: Reader) -> bool:
    """Whether another training began in between: a new model or a new optimizer."""
    rank = old.rank
    since, until = old.epochs[-1].began.at, new.epochs[0].began.at
    made = [e.at for e in rank.of(Wrapped)] + [e.at for e in rank.of(OptimizerSeen)][1:]
    return any(since < at < until for at in made)


def batch_size(readers: Sequence[Reader]) -> int:
    """Of the largest batch, also where it is for a batch sampler to say."""
    reported = [r.seen.batch_size for r in readers if r.seen.batch_size]
    found = (-(-e.samples // e.batches) for r in readers for e in r.epochs if e.batches)
    return max(reported) if reported else max(found, default=1)
