"""Whether ranks that read the same indices read the same data, by digests of samples."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from ...events import ContentRead
from ...events.pack import unpack
from .loaders import Epoch, Reader
from .thresholds import (
    AUGMENTED,
    DISTINCT,
    FEWEST_AUGMENTED,
    FEWEST_COMPARED,
    MANY,
    NO_ACCIDENT,
    ONCE,
    SAME,
    SURE,
    WHOLE,
)

Row = tuple[int, ...]
"""Digests of one sample, two for each part of the batch (see `ContentRead.columns`)."""


class Agreement(enum.Enum):
    """How the samples of ranks compare at equal indices."""

    SAME = enum.auto()
    DIFFERENT = enum.auto()
    RANDOM = enum.auto()
    """They differ, but also between two epochs of one rank (augmentation)."""
    UNKNOWN = enum.auto()


def rows(epoch: Epoch) -> list[tuple[int, Row]]:
    """(number of the batch, digests) of the examined samples, in order of delivery."""
    return [
        (batch, row)
        for read in epoch.content
        for batch, row in zip(numbers_of(read.batches), _rows(read), strict=False)
    ]


def in_one_order(readers: Sequence[Reader]) -> bool:
    """Whether all ranks begin their first epoch with the same samples, as far as is on record."""
    firsts = [[row for _, row in rows(r.epochs[0])] for r in readers if r.epochs]
    count = min(map(len, firsts), default=0)
    return all(first[:count] == firsts[0][:count] for first in firsts)


def _rows(read: ContentRead) -> Iterator[Row]:
    return zip(*(numbers_of(c) for c in read.columns), strict=False)


def numbers_of(text: str) -> list[int]:
    """Packed numbers of a record; empty where it is damaged."""
    try:
        return unpack(text)
    except ValueError:
        return []


def by_index(reader: Reader, number: int | None = None) -> dict[int, Row]:
    """Digests of samples by their index, of one epoch or else of the first that has them."""
    found: dict[int, Row] = {}
    epochs = reader.looked
    for epoch in epochs if number is None else epochs[number : number + 1]:
        for read in epoch.content:
            for index, row in zip(numbers_of(read.indices), _rows(read), strict=False):
                found.setdefault(index, row)
    return found


def agreement(readers: Sequence[Reader]) -> Agreement:
    """How the samples of these ranks compare at equal indices."""
    first, *others = readers
    mine = by_index(first)
    answers = [compare(mine, by_index(other)) for other in others]
    if Agreement.SAME in answers:
        return Agreement.SAME
    if Agreement.DIFFERENT not in answers:
        return Agreement.UNKNOWN
    between_epochs = [
        compare(by_index(r, 0), by_index(r, 1))
        for r in readers
        if len(r.earlier) + len(r.epochs) > 1
    ]
    return Agreement.RANDOM if Agreement.DIFFERENT in between_epochs else Agreement.DIFFERENT


def any_column_differs(readers: Sequence[Reader]) -> bool:
    """Whether some column of the digests differs at equal indices, whatever the other columns do:
    labels in a regular order agree between any two shards."""
    first, *others = (by_index(r) for r in readers)
    return any(Agreement.DIFFERENT in _column_agreements(first, other) for other in others)


def compare(a: dict[int, Row], b: dict[int, Row]) -> Agreement:
    """SAME where any telling column of the digests agrees, DIFFERENT where none does."""
    answers = _column_agreements(a, b)
    found = (a for a in (Agreement.SAME, Agreement.DIFFERENT) if a in answers)
    return next(found, Agreement.UNKNOWN)


def _columns(a: dict[int, Row], b: dict[int, Row]) -> Iterator[list[tuple[int, int]]]:
    """For each column of the digests the pairs of both sides at equal indices, in their order."""
    common = sorted(a.keys() & b.keys())
    for column in range(min((len(r) for r in (*a.values(), *b.values())), default=0)):
        pairs = [(a[i][column], b[i][column]) for i in common if a[i][column] and b[i][column]]
        if pairs:
            yield pairs


def distinct(values: Collection[object]) -> bool:
    """Whether hardly any of these digests are equal, so that each of them tells its sample."""
    return len(set(values)) >= DISTINCT * len(values)


def _column_agreements(a: dict[int, Row], b: dict[int, Row]) -> list[Agreement]:
    """How each column compares; constant ones and those with too few values are left out."""
    answers = []
    for pairs in _columns(a, b):
        agreed = sum(x == y for x, y in pairs) / len(pairs)
        values = [x for x, _ in pairs]
        chance = _chance(values)
        if len(pairs) * math.log(max(chance, 1e-9)) > math.log(SURE):
            # Constant, or too few values to tell samples that are equal; others tell themselves.
            if len(pairs) > 1 and not agreed and distinct(values):
                answers.append(Agreement.DIFFERENT)
            continue
        told_apart = len(pairs) >= FEWEST_AUGMENTED / AUGMENTED and distinct(values)
        if agreed >= (AUGMENTED if told_apart else SAME):
            own = told_apart and _in_blocks(pairs)
            answers.append(Agreement.DIFFERENT if own else Agreement.SAME)
        else:
            answers.append(Agreement.DIFFERENT if agreed < 0.5 else Agreement.UNKNOWN)
    return answers


def _in_blocks(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether samples that agree and samples that differ, in the order of their indices, form a few
    blocks: each rank then has common samples and its own. Augmented samples are mixed."""
    equal = [x == y for x, y in pairs]
    agreed, other = sum(equal), len(equal) - sum(equal)
    blocks = 1 + sum(one != then for one, then in pairwise(equal))
    return min(agreed, other) >= FEWEST_AUGMENTED / AUGMENTED and blocks <= agreed * other / len(
        equal
    )


def changed(a: dict[int, Row], b: dict[int, Row]) -> bool:
    """Whether some column of nearly all samples differs between two epochs."""
    return any(
        len(pairs) >= FEWEST_COMPARED and sum(x != y for x, y in pairs) >= 0.95 * len(pairs)
        for pairs in _columns(a, b)
    )


def shifts(a: dict[int, Row], b: dict[int, Row]) -> list[int]:
    """For each sample of `a` that `b` has too, how much higher its index in `a` is. Empty where too
    many samples are equal to tell."""
    if not (distinct(a.values()) and distinct(b.values())):
        return []
    places = {row: index for index, row in b.items()}
    return [index - places[row] for index, row in a.items() if row in places]


def moved_samples(a: dict[int, Row], b: dict[int, Row]) -> tuple[int, int]:
    """How many samples of the smaller side the other one has at another index, with all digests
    equal, and of how many."""
    few, many = sorted((a, b), key=len)
    return sum(shift != 0 for shift in shifts(few, many)), len(few)


def equal_positions(readers: Sequence[Reader]) -> int:
    """How many distinct samples all ranks delivered, each at the same position; 0 where one of them
    differs, or where only some samples were examined, chosen by their indices."""
    seen = [rows(r.epochs[0]) for r in readers]
    whole = all(len(found) >= r.epochs[0].samples for found, r in zip(seen, readers, strict=True))
    if not whole or any(found != seen[0] for found in seen):
        return 0
    different = {row for _, row in seen[0]}
    enough = len(different) >= NO_ACCIDENT and distinct([row for _, row in seen[0]])
    return len(different) if enough else 0


def _chance(values: list[int]) -> float:
    """The probability that two of these values, drawn at random, are equal."""
    counts = Counter(values)
    return sum((n / len(values)) ** 2 for n in counts.values())


def overlap(a: list[Row], b: list[Row]) -> tuple[int, int]:
    """How many samples of the smaller side the other has too, and of how many, by the column that
    tells most of them apart. (0, 0) where too many samples are equal to tell."""
    best = (0, 0)
    for column in range(min((len(r) for r in (*a, *b)), default=0)):
        mine, yours = ([r[column] for r in side if r[column]] for side in (a, b))
        enough = min(len(mine), len(yours)) >= FEWEST_COMPARED
        if enough and distinct(mine) and distinct(yours):
            common = len(set(mine) & set(yours))
            best = max(best, (common, min(len(set(mine)), len(set(yours)))))
    return best


# --- whole epochs of streams ---------------------------------------------------------------------


def same_pass(readers: Sequence[Reader], *, workers: bool, since: int = 0) -> tuple[int, int]:
    """How many rows two readers, or all workers of one reader, both delivered in a whole epoch, in
    any order, and of how many. (0, 0) where they are not one pass over the same data, or that is
    not known. Two epochs are compared from `since` on: those that draw with replacement, or choose
    by themselves, differ in one of them."""
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
    """The rows that each worker delivered in an epoch that ran to its end. Empty where some are not
    on record, or where rows repeat: random draws and padding are no pass over the data."""
    found: list[list[int]] = [[] for _ in range(workers)]
    covered: set[int] = set()
    for read in epoch.rows:
        for batch, row in zip(numbers_of(read.batches), numbers_of(read.rows), strict=False):
            covered.add(batch)
            found[batch % workers].append(row)
    if not epoch.exhausted or len(covered) < epoch.batches:
        return []
    once = all(len(p) >= MANY and len(set(p)) >= ONCE * len(p) and 0 not in p for p in found)
    return [set(p) for p in found] if once else []
