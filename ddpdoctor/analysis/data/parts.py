"""Parts of one data set that each rank selects for itself, and that overlap."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...events import Layer, Payload
from ...events.pack import unpack
from .content import APART, ONCE, Row, by_index, compare, reported_apart
from .epoch_audit import Audit
from .loaders import Epoch, Loader, Reader
from .sharing_ranks import groups_of
from .streams import MATERIAL

NEARLY_ALL = 0.9
"""Share of two selections that is the same where neither is meant to be a part."""

FEWEST = 8


def selected(layer: Layer) -> Sequence[int]:
    """What a `Subset` selects, in its order; empty where that is not on record."""
    first, step, count = layer.regular
    if count:
        return range(first, first + step * count, step)
    try:
        return unpack(layer.indices)
    except ValueError:  # a damaged record
        return ()


class Part(NamedTuple):
    """What one rank selects.

    Attributes:
        places: in the data set beneath, by the rank's own index.
    """

    reader: Reader
    places: Sequence[int]


@dataclass(eq=False)
class _Placed(Epoch):
    """With places for indices."""

    places: Sequence[int] = ()

    @cached_property
    def indices(self) -> list[int]:
        return sorted(self.places[i] for i in super().indices if i < len(self.places))


class Overlap(NamedTuple):
    """Parts that overlap, though what they are taken from is one data set.

    Attributes:
        audits: of what was read, by its place in that data set.
        told: the parts in words, by rank.
    """

    ranks: tuple[int, ...]
    audits: tuple[Audit, ...]
    reported: dict[int, str]


def overlapping(readers: list[Reader], made: tuple[Audit, ...]) -> Overlap | None:
    """Ranks of which one's part goes on where another's is not over, or that select nearly the
    same. Samples that all ranks are to have beside their own, or draws, are none of these."""
    if any(r.seen.distributed or r.seen.replacement for r in readers):
        return None
    depth = _depth(readers)
    parts = _selected(readers, depth, _overlap) if depth else _laid_out(readers)
    ranks = tuple(sorted(p.reader.rank.rank for p in parts))
    length = readers[0].seen.layers[depth].length if depth else 0
    audits = tuple(_placed(a, parts, length) for audit in made if (a := audit.of(ranks)))
    if not any(map(_much, audits)):
        return None
    return Overlap(ranks, audits, {p.reader.rank.rank: _told(p.places) for p in parts})


class Leak(NamedTuple):
    """Splits of one data set that each rank made for itself.

    Attributes:
        held: of each rank, how many samples it holds out that another trains on, and of how many.
        audits: of what was read, by its place in that data set.
    """

    held: dict[int, tuple[int, int]]
    audits: tuple[Audit, ...]


def leaking(
    readers: list[Reader], made: tuple[Audit, ...], others: Iterable[Loader]
) -> Leak | None:
    """Ranks that train on parts of one data set that have much in common, where each holds out for
    `others` what it does not train on itself, and another does."""
    depth = _depth(readers)
    if not depth or any(r.seen.distributed or r.seen.replacement for r in readers):
        return None
    parts = _selected(readers, depth, _in_common)
    trained = {p.reader.rank.rank: set(p.places) for p in parts}
    held: dict[int, tuple[int, int]] = {}
    for part in parts:
        rank = part.reader.rank.rank
        kept = _held_out(part.reader.seen.layers[depth].data, rank, others)
        elsewhere = set().union(*(places for r, places in trained.items() if r != rank))
        leaked = len(kept & elsewhere)
        if not kept & trained[rank] and leaked >= max(FEWEST, MATERIAL * len(kept)):
            held[rank] = leaked, len(kept)
    if len(held) < max(2, len(parts)):
        return None
    length = readers[0].seen.layers[depth].length
    return Leak(held, tuple(_placed(a, parts, length) for m in made if (a := m.of(held))))


def divided(readers: list[Reader]) -> int:
    """How many samples the parts that the ranks select hold together, where these divide one data
    set already: no sample is in two, and hardly any in none; 0 otherwise."""
    depth = _depth(readers)
    if not depth or not _one_beneath(readers, depth):
        return 0
    places = [_through(r.seen.layers[:depth]) for r in readers]
    together, length = set().union(*places), readers[0].seen.layers[depth].length
    apart = all(places) and len(together) == sum(map(len, places))
    return len(together) if apart and len(together) >= NEARLY_ALL * length else 0


def _held_out(data: int, rank: int, others: Iterable[Loader]) -> set[int]:
    """The places of one data set that a rank evaluates."""
    found: set[int] = set()
    for loader in others:
        reader = loader.readers.get(rank)
        layers = reader.seen.layers if reader and reader.read and not loader.trains else ()
        numbers = [e.data for e in layers]
        if data >= 0 and data in numbers[1:]:
            found |= set(_through(layers[: numbers.index(data)]))
    return found


def _in_common(a: Part, b: Part, world: int) -> bool:
    few = min(len(a.places), len(b.places))
    common = len(set(a.places) & set(b.places))
    return common >= max(FEWEST, MATERIAL * few) and not _may_share(a.reader, b.reader, world)


def _much(audit: Audit) -> bool:
    """Whether ranks read enough of what another one read."""
    few = min(len(read) for read in audit.per_rank.values())
    return audit.sampled == 1 and len(audit.shared) >= max(FEWEST, MATERIAL * few)


def _selected(
    readers: list[Reader], depth: int, alike: Callable[[Part, Part, int], bool]
) -> list[Part]:
    """Those of the parts that the ranks select of which two are `alike`; empty where none are, or
    it is not known to be one data set that they select from."""
    parts = [Part(r, _through(r.seen.layers[:depth])) for r in readers]
    if not all(p.places for p in parts) or not _one_beneath(readers, depth):
        return []
    found = [(a, b) for a, b in itertools.combinations(parts, 2) if alike(a, b, len(readers))]
    answers = {_contents(a, b) for a, b in found}
    beneath = _beneath(readers[0], depth)
    if "differ" in answers or (not beneath and "same" not in answers):
        return []
    return [p for p in parts if any(p is a or p is b for a, b in found)]


def _laid_out(readers: list[Reader]) -> list[Part]:
    """The data of ranks whose samples are those of another rank so many places further on."""
    starts = [{n: 0} for n in range(len(readers))]
    for a, b in itertools.combinations(range(len(readers)), 2):
        mine, theirs = starts[a], starts[b]
        shift = 0 if mine is theirs else _shift(readers[a], readers[b])
        if shift and not _may_share(readers[a], readers[b], len(readers)):
            moved = mine[a] + shift - theirs[b]
            mine.update({n: start + moved for n, start in theirs.items()})
            for n in theirs:
                starts[n] = mine
    parts: dict[int, Part] = {}
    end = 0
    for joined in (found for n, found in enumerate(starts) if n == min(found) and len(found) > 1):
        begin = end - min(joined.values())
        for n, start in joined.items():
            places = range(begin + start, begin + start + readers[n].seen.length)
            parts[n] = Part(readers[n], places)
            end = max(end, places.stop)
    return [parts[n] for n in sorted(parts)]


def _shift(a: Reader, b: Reader) -> int:
    """The place in the data of `a` at which that of `b` begins, or so many before it; 0 where
    neither goes on where the other is not over."""
    mine, theirs = by_index(a), by_index(b)
    if any(len(set(rows.values())) < APART * len(rows) for rows in (mine, theirs)):
        return 0
    places = {row: index for index, row in theirs.items()}
    shifts = Counter(index - places[row] for index, row in mine.items() if row in places)
    shift, count = max(shifts.items(), key=lambda item: item[1], default=(0, 0))
    both = [mine[i] == theirs[i - shift] for i in mine if i - shift in theirs]
    clear = ONCE * max(len(both), sum(shifts.values()))
    if not shift or count < max(FEWEST, clear):
        return 0
    first, second = (a, b) if shift > 0 else (b, a)
    common = first.seen.length - abs(shift)
    few = min(a.seen.length, b.seen.length)
    return shift if MATERIAL * few <= common <= second.seen.length else 0


def _depth(readers: list[Reader]) -> int:
    """How many layers there are above the first that is the same on all ranks."""
    unlike = 0
    for depth, layers in enumerate(zip(*(r.seen.layers for r in readers), strict=False), 1):
        if len({(e.indices, e.regular) for e in layers}) > 1:
            unlike = depth
    return unlike if all(len(r.seen.layers) > unlike for r in readers) else 0


def _through(layers: Sequence[Layer]) -> Sequence[int]:
    outer, *inner = (selected(layer) for layer in layers)
    for chosen in inner:
        outer = [chosen[i] for i in outer if 0 <= i < len(chosen)]
    return outer if len(set(outer)) == len(outer) else ()


def _beneath(reader: Reader, depth: int) -> list[Payload]:
    """What the samples of the data set beneath are made of."""
    under = [p for p in reader.seen.payloads if p.name.startswith("dataset." * depth)]
    return [p for p in under if not p.name.endswith("indices")]


def _one_beneath(readers: list[Reader], depth: int) -> bool:
    """Whether nothing speaks against it that all ranks select from the same."""
    under = {
        tuple(p for p in r.seen.payloads if p.name.startswith("dataset." * depth)) for r in readers
    }
    lengths = {r.seen.layers[depth].length for r in readers}
    return len(under) == len(lengths) == 1 and not reported_apart(readers)


def _overlap(a: Part, b: Part, world: int) -> bool:
    shared = set(a.places) & set(b.places)
    count, (few, many) = len(shared), sorted((len(a.places), len(b.places)))
    if count < max(FEWEST, MATERIAL * few) or list(a.places) == list(b.places):
        return False
    if _may_share(a.reader, b.reader, world):
        return False
    first, second = list(a.places), list(b.places)
    goes_on = first[-count:] == second[:count] or second[-count:] == first[:count]
    return goes_on or count >= NEARLY_ALL * many


def _may_share(a: Reader, b: Reader, world: int) -> bool:
    """Whether both are in a smaller group, which may share its part on purpose."""
    both = {a.rank.rank, b.rank.rank}
    return any(both <= group and len(group) < world for group in groups_of(a.rank))


def _contents(a: Part, b: Part) -> str:
    """As `compare`, of the samples at the same places; `random` where no rank sees one twice."""
    answer = compare(_by_place(a), _by_place(b))
    if answer == "differ" and any(
        compare(by_index(p.reader, 0), by_index(p.reader, 1)) == "differ" for p in (a, b)
    ):
        return "random"
    return answer


def _by_place(part: Part) -> dict[int, Row]:
    rows = by_index(part.reader).items()
    return {part.places[i]: row for i, row in rows if i < len(part.places)}


def _placed(audit: Audit, parts: list[Part], length: int) -> Audit:
    """The same with places for indices, in a data set of that length at least."""
    by_rank = {p.reader.rank.rank: p.places for p in parts}
    placed: dict[int, Epoch] = {
        rank: _Placed(
            e.number, e.seen, e.began, e.ended, e.parts, e.content, e.steps, places=by_rank[rank]
        )
        for rank, e in audit.epochs.items()
    }
    last = max(max(places) for places in by_rank.values())
    return Audit(audit.number, max(length, last + 1), placed)


def _told(places: Sequence[int]) -> str:
    first, last = places[0], places[-1]
    regular = list(places) == list(range(first, first + len(places)))
    return f"{first} to {last}" if regular else f"{len(places)} samples, {first} to {last}"
