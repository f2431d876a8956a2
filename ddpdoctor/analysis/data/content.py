"""Whether two ranks that read the same indices read the same data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...events import ContentRead
from ...events.pack import unpack
from .loaders import Epoch, Reader

SURE = 1e-3
"""Agreement that chance alone would give this rarely is no chance."""

SAME = 0.6
"""Share of equal digests; the longest text of a batch looks like another where others pad."""

AUGMENTED = 0.2
"""Share that suffices where no two samples look alike: some are flipped, the others are the same
samples beyond doubt."""

FEWEST = 3

APART = 0.75
"""Share of values that are distinct where samples can be told from each other."""

WHOLE = 0.8
"""Share of two passes that is the same although the last batches of each may be dropped."""

ONCE = 0.95
MANY = 32
"""Rows of a pass, and the share of them that occurs once."""

PLACES = 8
"""Samples at the same places that are no chance."""

Row = tuple[int, ...]


def rows(epoch: Epoch) -> list[tuple[int, Row]]:
    """(number of the batch, digests) of the fingerprinted samples, in order of delivery."""
    return [
        (batch, row)
        for read in epoch.content
        for batch, row in zip(_numbers(read.batches), _rows(read), strict=False)
    ]


def _rows(read: ContentRead) -> Iterator[Row]:
    return zip(*(_numbers(c) for c in read.columns), strict=False)


def _numbers(text: str) -> list[int]:
    try:
        return unpack(text)
    except ValueError:  # a damaged record
        return []


def by_index(reader: Reader, number: int | None = None) -> dict[int, Row]:
    """Digests of samples by their index, of one epoch or of the first that has them."""
    found: dict[int, Row] = {}
    epochs = reader.looked
    for epoch in epochs if number is None else epochs[number : number + 1]:
        for read in epoch.content:
            for index, row in zip(_numbers(read.indices), _rows(read), strict=False):
                found.setdefault(index, row)
    return found


def verdict(readers: Sequence[Reader]) -> str:
    """`same`, `differ`, `random` (no rank sees the same twice) or `unknown`, at equal indices."""
    first, *others = readers
    mine = by_index(first)
    answers = [compare(mine, by_index(other)) for other in others]
    if "same" in answers:
        return "same"
    if "differ" not in answers:
        return "unknown"
    again = [
        compare(by_index(r, 0), by_index(r, 1))
        for r in readers
        if len(r.earlier) + len(r.epochs) > 1
    ]
    return "random" if "differ" in again else "differ"


def parts_differ(readers: Sequence[Reader]) -> bool:
    """Whether at equal indices some telling part of the samples is another, whatever else agrees:
    labels in a regular order agree between any two shards."""
    first, *others = (by_index(r) for r in readers)
    return any("differ" in _answers(first, other) for other in others)


def compare(a: dict[int, Row], b: dict[int, Row]) -> str:
    """`same` where any telling part of the samples agrees, `differ` where none does."""
    answers = _answers(a, b)
    return next((a for a in ("same", "differ") if a in answers), "unknown")


def _answers(a: dict[int, Row], b: dict[int, Row]) -> list[str]:
    """For each telling part of the samples."""
    common = a.keys() & b.keys()
    answers = []
    for column in range(min((len(r) for r in (*a.values(), *b.values())), default=0)):
        pairs = [
            (a[i][column], b[i][column]) for i in sorted(common) if a[i][column] and b[i][column]
        ]
        if not pairs:
            continue
        agreed = sum(x == y for x, y in pairs) / len(pairs)
        values = [x for x, _ in pairs]
        chance = _chance(values)
        if len(pairs) * math.log(max(chance, 1e-9)) > math.log(SURE):
            continue  # constant, or too few values to tell
        unlike = len(pairs) >= FEWEST / AUGMENTED and len(set(values)) >= APART * len(values)
        if agreed >= (AUGMENTED if unlike else SAME):
            answers.append("differ" if unlike and _own_parts(pairs) else "same")
        else:
            answers.append("differ" if agreed < 0.5 else "unknown")
    return answers


def _own_parts(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether samples that agree and samples that do not, in the order of their indices, stand in a
    few blocks: each rank has common ones and ones of its own. Augmented ones are mixed."""
    alike = [x == y for x, y in pairs]
    agreed, other = sum(alike), len(alike) - sum(alike)
    blocks = 1 + sum(one != then for one, then in pairwise(alike))
    return min(agreed, other) >= FEWEST / AUGMENTED and blocks <= agreed * other / len(alike)


def changed(a: dict[int, Row], b: dict[int, Row]) -> bool:
    """Whether some part of nearly all samples is another in `b` than in `a`."""
    common = a.keys() & b.keys()
    for column in range(min((len(r) for r in (*a.values(), *b.values())), default=0)):
        pairs = [(a[i][column], b[i][column]) for i in common if a[i][column] and b[i][column]]
        if len(pairs) >= 4 and sum(x != y for x, y in pairs) >= 0.95 * len(pairs):
            return True
    return False


def elsewhere(a: dict[int, Row], b: dict[int, Row]) -> tuple[int, int]:
    """How many samples of the smaller side the other one has at another index, all of a sample
    being the same, and of how many. (0, 0) where samples are too alike to tell."""
    few, many = sorted((a, b), key=len)
    if any(len(set(side.values())) < APART * len(side) for side in (few, many)):
        return (0, 0)
    places = {row: index for index, row in many.items()}
    found = sum(places.get(row, index) != index for index, row in few.items())
    return found, len(few)


def same_places(readers: Sequence[Reader]) -> int:
    """How many samples, unlike each other, all ranks delivered at the same places; 0 where one of
    them is another sample, or where only some samples were looked at, chosen by their indices."""
    seen = [rows(r.epochs[0]) for r in readers]
    whole = all(len(found) >= r.epochs[0].samples for found, r in zip(seen, readers, strict=True))
    if not whole or any(found != seen[0] for found in seen):
        return 0
    unlike = len({row for _, row in seen[0]})
    return unlike if unlike >= max(PLACES, APART * len(seen[0])) else 0


def read_alike(readers: Sequence[Reader]) -> list[list[Reader]]:
    """Those together of which all indices on record everywhere stand for samples of the same
    digests, and whose data sets are made of the same."""
    samples = [by_index(r) for r in readers]
    common = sorted(set.intersection(*map(set, samples)))
    groups: dict[object, list[Reader]] = {}
    for reader, found in zip(readers, samples, strict=True):
        made_of = tuple((p.name, p.order, p.length) for p in reader.seen.payloads)
        key = reader.seen.length, made_of, tuple(found[i] for i in common)
        groups.setdefault(key, []).append(reader)
    return list(groups.values())


def held_alike(readers: Sequence[Reader]) -> list[str]:
    """What the data sets make each sample of, where it is the same on all ranks, and all else that
    they are told is, too. Equal texts may stand for other files on another machine."""
    first = readers[0]
    if not first.seen.settings or len({r.seen.settings for r in readers}) > 1:
        return []
    one_machine = len({r.rank.node for r in readers}) < len(readers)
    common = set.intersection(
        *({(p.name, p.order, p.length) for p in r.seen.payloads} for r in readers)
    )
    return [
        p.name
        for p in first.seen.payloads
        if p.tells and (p.name, p.order, p.length) in common and (p.kind != "text" or one_machine)
    ]


def reported_apart(readers: Sequence[Reader]) -> bool:
    """Whether the data sets are told other numbers or texts on other ranks (which of the ranks it
    is, say), and none is known to take an entry at the very index that it is given."""
    reported = {r.seen.settings for r in readers}
    tells = any(p.tells for r in readers for p in r.seen.payloads)
    return len(reported) > 1 and 0 not in reported and not tells


def _chance(values: list[int]) -> float:
    """How often two of them agree by chance."""
    counts = Counter(values)
    return sum((n / len(values)) ** 2 for n in counts.values())


def overlap(a: list[Row], b: list[Row]) -> tuple[int, int]:
    """Of the samples that tell each other apart: how many of the smaller side the other has too,
    and how many there are. (0, 0) where samples are too alike to tell."""
    best = (0, 0)
    for column in range(min((len(r) for r in (*a, *b)), default=0)):
        mine, yours = ([r[column] for r in side if r[column]] for side in (a, b))
        if min(len(mine), len(yours)) < 4:
            continue
        apart = all(len(set(side)) >= APART * len(side) for side in (mine, yours))
        if apart:
            common = len(set(mine) & set(yours))
            best = max(best, (common, min(len(set(mine)), len(set(yours)))))
    return best


# --- whole epochs of streams ---------------------------------------------------------------------


def same_pass(readers: Sequence[Reader], *, workers: bool, since: int = 0) -> tuple[int, int]:
    """Whether two readers, or all workers of one, delivered the same rows in whole epochs (from
    `since` on), in whatever order: how many were the same, and of how many. (0, 0) where not, or
    not known.

    Those that draw with replacement, or a choice of their own, differ in one epoch or the next.
    """
    found = (0, 0)
    for epochs in zip(*(r.epochs[since : since + 2] for r in readers), strict=False):
        given = [_passes(e, max(1, e.seen.workers)) for e in epochs]
        sets = given[0] if workers else [set().union(*g) for g in given]
        if len(sets) < 2 or not all(sets):
            continue
        common, of = len(set.intersection(*sets)), max(map(len, sets))
        if common < WHOLE * of:
            return (0, 0)
        found = found if found[1] else (common, of)
    return found


def _passes(epoch: Epoch, workers: int) -> list[set[int]]:
    """What each worker delivered in an epoch that ran dry. Empty where some of it is not on record,
    or rows are repeated: nothing that is drawn at random or filled up tells one pass."""
    found: list[list[int]] = [[] for _ in range(workers)]
    covered: set[int] = set()
    for read in epoch.rows:
        for batch, row in zip(_numbers(read.batches), _numbers(read.rows), strict=False):
            covered.add(batch)
            found[batch % workers].append(row)
    if not epoch.exhausted or len(covered) < epoch.batches:
        return []
    once = all(len(p) >= MANY and len(set(p)) >= ONCE * len(p) and 0 not in p for p in found)
    return [set(p) for p in found] if once else []
