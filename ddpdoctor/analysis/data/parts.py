"""Parts of one dataset that each rank selects: overlapping, leaking, or sharded twice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from ...events import Layer, Payload
from ...events.pack import unpack
from .content import Agreement, Row, by_index, compare, shifts
from .datasets import settings_differ
from .division import Division
from .epoch_audit import Audit
from .loaders import Epoch, Loader, Reader
from .sharing_ranks import groups_of
from .thresholds import MATERIAL, NEARLY_ALL, NO_ACCIDENT, ONCE

if TYPE_CHECKING:
    import numpy as np


def selected(layer: Layer) -> Sequence[int]:
    """The indices that a `Subset` selects, in its order; empty where they are not on record."""
    first, step, count = layer.regular
    if count:
        return range(first, first + step * count, step)
    try:
        return unpack(layer.indices)
    except ValueError:  # a damaged record
        return ()


class Selection(NamedTuple):
    """The samples that one rank selects.

    Attributes:
        places: their indices in the dataset beneath, by the rank's own index.
    """

    reader: Reader
    places: Sequence[int]


@dataclass(eq=False)
class _Placed(Epoch):
    """An epoch whose indices are those of the dataset beneath."""

    places: Sequence[int] = ()

    @property
    def read(self) -> np.ndarray:
        import numpy as np

        read = super().read
        return np.sort(np.asarray(self.places)[read[read < len(self.places)]])


class Overlap(NamedTuple):
    """Selections from one dataset that overlap.

    Attributes:
        audits: of what was read, by its index in that dataset.
        selected: the selections in words, by rank.
    """

    ranks: tuple[int, ...]
    audits: tuple[Audit, ...]
    selected: dict[int, str]


def overlapping(division: Division) -> Overlap | None:
    """Ranks whose selections overlap: one begins before another ends, or both are nearly the same.
    None where samples are drawn at random, or where all ranks share some samples on purpose."""
    readers = division.readers
    if any(r.seen.distributed or r.seen.replacement for r in readers):
        return None
    depth = _depth(readers)
    parts = _selected(readers, depth, _overlaps) if depth else _by_content(readers)
    ranks = tuple(sorted(p.reader.rank.rank for p in parts))
    length = readers[0].seen.layers[depth].length if depth else 0
    audits = tuple(_placed(a, parts, length) for a in division.of(ranks).audits)
    if not any(map(_shares_much, audits)):
        return None
    return Overlap(ranks, audits, {p.reader.rank.rank: _range_text(p.places) for p in parts})


class Leak(NamedTuple):
    """Splits of one dataset that each rank made for itself.

    Attributes:
        held_out: by rank, how many of the samples that it holds out another rank trains on, and how
            many it holds out.
        audits: of what was read, by its index in that dataset.
    """

    held_out: dict[int, tuple[int, int]]
    audits: tuple[Audit, ...]


def in_folds(readers: Sequence[Reader]) -> bool:
    """Whether each rank reads another selection of one dataset, the same in all epochs, and all of
    these have much in common: as in a cross-validation with a fold for each rank, which that rank
    leaves out."""
    depth = _depth(list(readers))
    if len(readers) < 2 or any(r.seen.distributed or r.seen.replicas > 1 for r in readers):
        return False
    if depth and not _one_beneath(list(readers), depth):
        return False
    every = [_selection(reader, depth) for reader in readers]
    for mine, theirs in itertools.permutations(every, 2):
        enough = max(NO_ACCIDENT, MATERIAL * len(mine))
        if len(mine & theirs) < enough or len(theirs - mine) < NO_ACCIDENT:
            return False
    return True


def _selection(reader: Reader, depth: int) -> set[int]:
    """The samples that a rank selects, by their index in the dataset beneath; empty where it does
    not read the same ones in each epoch."""
    if depth:
        return set(_through(reader.seen.layers[:depth]))
    first, *others = [set(epoch.indices) for epoch in reader.epochs]
    return first if others and all(other == first for other in others) else set()


def leaking(division: Division, others: Iterable[Loader]) -> Leak | None:
    """Ranks that train on parts of one dataset with much in common, where each evaluates (in
    `others`) samples that it does not train on, and that another rank trains on."""
    readers = division.readers
    depth = _depth(readers)
    if not depth or any(r.seen.distributed or r.seen.replacement for r in readers):
        return None
    parts = _selected(readers, depth, _have_samples_in_common)
    trained = {p.reader.rank.rank: set(p.places) for p in parts}
    held_out: dict[int, tuple[int, int]] = {}
    for part in parts:
        rank = part.reader.rank.rank
        kept = _evaluated(part.reader.seen.layers[depth].data, rank, others)
        elsewhere = set().union(*(places for r, places in trained.items() if r != rank))
        leaked = len(kept & elsewhere)
        if not kept & trained[rank] and leaked >= max(NO_ACCIDENT, MATERIAL * len(kept)):
            held_out[rank] = leaked, len(kept)
    if len(held_out) < max(2, len(parts)):
        return None
    length = readers[0].seen.layers[depth].length
    return Leak(held_out, tuple(_placed(a, parts, length) for a in division.of(held_out).audits))


def divided(readers: list[Reader]) -> int:
    """How many samples the ranks' selections hold together, where these divide one dataset already:
    no sample is in two of them, and hardly any in none; 0 otherwise."""
    depth = _depth(readers)
    if not depth or not _one_beneath(readers, depth):
        return 0
    places = [_through(r.seen.layers[:depth]) for r in readers]
    together, length = set().union(*places), readers[0].seen.layers[depth].length
    disjoint = all(places) and len(together) == sum(map(len, places))
    return len(together) if disjoint and len(together) >= NEARLY_ALL * length else 0


def _evaluated(data: int, rank: int, others: Iterable[Loader]) -> set[int]:
    """Indices of one dataset (a number of `Layer.data`) that a rank evaluates."""
    found: set[int] = set()
    for loader in others:
        reader = loader.readers.get(rank)
        layers = reader.seen.layers if reader and reader.read and not loader.trains else ()
        numbers = [e.data for e in layers]
        if data >= 0 and data in numbers[1:]:
            found |= set(_through(layers[: numbers.index(data)]))
    return found


def _have_samples_in_common(a: Selection, b: Selection, world: int) -> bool:
    few = min(len(a.places), len(b.places))
    common = len(set(a.places) & set(b.places))
    return common >= max(NO_ACCIDENT, MATERIAL * few) and not _may_share(a.reader, b.reader, world)


def _shares_much(audit: Audit) -> bool:
    """Whether several ranks read a material part of the samples."""
    few = min(len({*e.of_every(audit.sampled).tolist()}) for e in audit.epochs.values())
    return audit.sampled == 1 and len(audit.shared) >= max(NO_ACCIDENT, MATERIAL * few)


def _selected(
    readers: list[Reader], depth: int, related: Callable[[Selection, Selection, int], bool]
) -> list[Selection]:
    """The ranks' selections of which any two are `related`; empty where none are, or where they are
    not known to select from one dataset."""
    parts = [Selection(r, _through(r.seen.layers[:depth])) for r in readers]
    if not all(p.places for p in parts) or not _one_beneath(readers, depth):
        return []
    found = [(a, b) for a, b in itertools.combinations(parts, 2) if related(a, b, len(readers))]
    answers = {_content_agreement(a, b) for a, b in found}
    beneath = _beneath(readers[0], depth)
    if Agreement.DIFFERENT in answers or (not beneath and Agreement.SAME not in answers):
        return []
    return [p for p in parts if any(p is a or p is b for a, b in found)]


def _by_content(readers: list[Reader]) -> list[Selection]:
    """Selections of ranks that hold their own lists, where one rank's samples are those of another
    rank at shifted indices. The places are made up, such that equal samples are at equal ones."""
    starts = [{n: 0} for n in range(len(readers))]
    for a, b in itertools.combinations(range(len(readers)), 2):
        mine, theirs = starts[a], starts[b]
        shift = 0 if mine is theirs else _shift(readers[a], readers[b])
        if shift and not _may_share(readers[a], readers[b], len(readers)):
            moved = mine[a] + shift - theirs[b]
            mine.update({n: start + moved for n, start in theirs.items()})
            for n in theirs:
                starts[n] = mine
    parts: dict[int, Selection] = {}
    end = 0
    for joined in (found for n, found in enumerate(starts) if n == min(found) and len(found) > 1):
        begin = end - min(joined.values())
        for n, start in joined.items():
            places = range(begin + start, begin + start + readers[n].seen.length)
            parts[n] = Selection(readers[n], places)
            end = max(end, places.stop)
    return [parts[n] for n in sorted(parts)]


def _shift(a: Reader, b: Reader) -> int:
    """The index in `a` at which the data of `b` begins, negative where `a` begins within `b`; 0
    where neither begins before the other ends."""
    mine, theirs = by_index(a), by_index(b)
    by_shift = Counter(shifts(mine, theirs))
    shift, count = max(by_shift.items(), key=lambda item: item[1], default=(0, 0))
    both = [mine[i] == theirs[i - shift] for i in mine if i - shift in theirs]
    clear = ONCE * max(len(both), by_shift.total())
    if not shift or count < max(NO_ACCIDENT, clear):
        return 0
    first, second = (a, b) if shift > 0 else (b, a)
    common = first.seen.length - abs(shift)
    few = min(a.seen.length, b.seen.length)
    return shift if MATERIAL * few <= common <= second.seen.length else 0


def _depth(readers: list[Reader]) -> int:
    """How many layers of `Subset` there are above the first layer that is the same on all ranks."""
    differing = 0
    for depth, layers in enumerate(zip(*(r.seen.layers for r in readers), strict=False), 1):
        if len({(e.indices, e.regular) for e in layers}) > 1:
            differing = depth
    return differing if all(len(r.seen.layers) > differing for r in readers) else 0


def _through(layers: Sequence[Layer]) -> Sequence[int]:
    """Indices in the dataset beneath these layers, by index in the outermost; empty where one comes
    twice or is not on record."""
    outer, *inner = (selected(layer) for layer in layers)
    for chosen in inner:
        outer = [chosen[i] for i in outer if 0 <= i < len(chosen)]
    return outer if len(set(outer)) == len(outer) else ()


def _beneath(reader: Reader, depth: int) -> list[Payload]:
    """What the samples of the dataset beneath are made of."""
    under = [p for p in reader.seen.payloads if p.name.startswith("dataset." * depth)]
    return [p for p in under if not p.name.endswith("indices")]


def _one_beneath(readers: list[Reader], depth: int) -> bool:
    """Whether all that is recorded of the dataset beneath is the same on all ranks."""
    under = {
        tuple(p for p in r.seen.payloads if p.name.startswith("dataset." * depth)) for r in readers
    }
    lengths = {r.seen.layers[depth].length for r in readers}
    return len(under) == len(lengths) == 1 and not settings_differ(readers)


def _overlaps(a: Selection, b: Selection, world: int) -> bool:
    """Whether two selections overlap by mistake. Equal ones are not meant here: all ranks then read
    the same data."""
    shared = set(a.places) & set(b.places)
    count, (few, many) = len(shared), sorted((len(a.places), len(b.places)))
    if count < max(NO_ACCIDENT, MATERIAL * few) or list(a.places) == list(b.places):
        return False
    if _may_share(a.reader, b.reader, world):
        return False
    first, second = list(a.places), list(b.places)
    goes_on = first[-count:] == second[:count] or second[-count:] == first[:count]
    return goes_on or count >= NEARLY_ALL * many


def _may_share(a: Reader, b: Reader, world: int) -> bool:
    """Whether both ranks are in a group of fewer than `world` ranks, which may share data on
    purpose (tensor parallelism)."""
    both = {a.rank.rank, b.rank.rank}
    return any(both <= group and len(group) < world for group in groups_of(a.rank))


def _content_agreement(a: Selection, b: Selection) -> Agreement:
    """How the samples at equal places of the dataset beneath compare."""
    answer = compare(_by_place(a), _by_place(b))
    if answer is Agreement.DIFFERENT and any(
        compare(by_index(p.reader, 0), by_index(p.reader, 1)) is Agreement.DIFFERENT for p in (a, b)
    ):
        return Agreement.RANDOM
    return answer


def _by_place(part: Selection) -> dict[int, Row]:
    rows = by_index(part.reader).items()
    return {part.places[i]: row for i, row in rows if i < len(part.places)}


def _placed(audit: Audit, parts: list[Selection], length: int) -> Audit:
    """An audit of the dataset beneath, of at least that length, from one of the ranks' own."""
    by_rank = {p.reader.rank.rank: p.places for p in parts}
    placed: dict[int, Epoch] = {
        rank: _Placed(**{f.name: getattr(e, f.name) for f in fields(Epoch)}, places=by_rank[rank])
        for rank, e in audit.epochs.items()
    }
    last = max(max(places) for places in by_rank.values())
    return Audit(audit.number, max(length, last + 1), placed)


def _range_text(places: Sequence[int]) -> str:
    """`0 to 199`, or `200 samples, 3 to 398` where they are not consecutive."""
    first, last = places[0], places[-1]
    regular = list(places) == list(range(first, first + len(places)))
    return f"{first} to {last}" if regular else f"{len(places)} samples, {first} to {last}"
