"""Parts of one data set that each rank selects for itself, and that overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ddpdoctor.events import Layer, Payload
from ddpdoctor.events.pack import unpack

from ._audit import Audit
from ._content import Row, by_index, compare, told_apart
from ._loaders import Epoch, Reader, groups_of
from ._streams import MATERIAL

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
    told: dict[int, str]


def overlapping(readers: list[Reader], made: tuple[Audit, ...]) -> Overlap | None:
    """Ranks of which one's part goes on where another's is not over, or that select nearly the
    same. Samples that all ranks are to have beside their own, or draws, are none of these."""
    if any(r.seen.distributed or r.seen.replacement for r in readers):
        return None
    if not (depth := _depth(readers)):
        return None
    parts = [Part(r, _through(r.seen.layers[:depth])) for r in readers]
    if not all(p.places for p in parts) or not _one_beneath(readers, depth):
        return None
    found = [(a, b) for a, b in itertools.combinations(parts, 2) if _overlap(a, b, len(readers))]
    answers = {_contents(a, b) for a, b in found}
    beneath = _beneath(readers[0], depth)
    if not found or "differ" in answers or (not beneath and "same" not in answers):
        return None
    ranks = tuple(sorted({p.reader.rank.rank for pair in found for p in pair}))
    audits = tuple(_placed(audit, parts, depth) for audit in made if audit.sampled == 1)
    told = {p.reader.rank.rank: _told(p.places) for p in parts if p.reader.rank.rank in ranks}
    return Overlap(ranks, audits, told) if any(a.shared for a in audits) else None


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
    return len(under) == len(lengths) == 1 and not told_apart(readers)


def _overlap(a: Part, b: Part, world: int) -> bool:
    shared = set(a.places) & set(b.places)
    count, (few, many) = len(shared), sorted((len(a.places), len(b.places)))
    if count < max(FEWEST, MATERIAL * few) or list(a.places) == list(b.places):
        return False
    both = {a.reader.rank.rank, b.reader.rank.rank}
    if any(both <= g and len(g) < world for g in groups_of(a.reader.rank)):
        return False  # a group that may share on purpose
    first, second = list(a.places), list(b.places)
    goes_on = first[-count:] == second[:count] or second[-count:] == first[:count]
    return goes_on or count >= NEARLY_ALL * many


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


def _placed(audit: Audit, parts: list[Part], depth: int) -> Audit:
    """The same with places for indices."""
    by_rank = {p.reader.rank.rank: p.places for p in parts}
    placed: dict[int, Epoch] = {
        rank: _Placed(
            e.number, e.seen, e.began, e.ended, e.parts, e.content, e.steps, places=by_rank[rank]
        )
        for rank, e in audit.epochs.items()
    }
    last = max(max(places) for places in by_rank.values())
    length = max(parts[0].reader.seen.layers[depth].length, last + 1)
    return Audit(audit.number, length, placed)


def _told(places: Sequence[int]) -> str:
    first, last = places[0], places[-1]
    regular = list(places) == list(range(first, first + len(places)))
    return f"{first} to {last}" if regular else f"{len(places)} samples, {first} to {last}"
