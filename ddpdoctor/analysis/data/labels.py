"""Whether the ranks give one sample the same label: whole numbers of samples (labels, ids), by the
index of the sample."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...events import PerProcess
from ...run import Run
from .content import Agreement, by_index, compare, numbers_of
from .division import Division, divided_loaders
from .loaders import Reader
from .thresholds import FEWEST_KEPT, FEWEST_LABELS, LABELS_DIFFER, RENUMBERED

Column = tuple[str, int]
"""The kinds of all columns of a record (`ContentRead.numbers`), and the position of one of them."""


@dataclass(eq=False)
class Renumbered:
    """A loader whose samples have other labels on other ranks.

    Attributes:
        compared: samples of the two ranks that differ most; `differ` of them have other numbers.
        values: how many different numbers these samples have on the first rank.
        same_samples: all else is known to be equal at equal indices.
        cause: the line of the program that may give other numbers in each process; None if none
            was found.
    """

    division: Division
    compared: int
    differ: int
    values: int
    same_samples: bool
    cause: PerProcess | None

    @property
    def rule(self) -> str:
        return {"hash": "hashed-labels", "set": "labels-from-a-set"}.get(
            self.cause.how if self.cause else "", "other-labels"
        )


def renumbered(run: Run) -> Iterator[Renumbered]:
    """The loaders whose samples have other numbers on other ranks, although they are the same
    samples."""
    for division in divided_loaders(run):
        found = max(_differing(division), default=None)
        if found is not None:
            differ, compared, values, same = found
            causes = division.readers[0].seen.per_process
            cause = next((c for c in causes if c.how in ("hash", "set")), None)
            yield Renumbered(division, compared, differ, values, same, cause)


def _differing(division: Division) -> Iterator[tuple[int, int, int, bool]]:
    """For ranks and columns with other numbers at equal indices: how many differ, of how many
    samples, how many different numbers there are, and whether all else is known to be equal."""
    labels = [(reader, _labels(reader)) for reader in division.readers]
    # Neighbours suffice: not all of them can agree where the ranks differ.
    for (one, mine), (other, theirs) in pairwise(labels):
        same = compare(by_index(one), by_index(other)) is Agreement.SAME
        if not (division.distributed or same):
            continue  # equal indices may be other samples
        for column in mine.keys() & theirs.keys():
            a, b = mine[column], theirs[column]
            common = sorted(a.first.keys() & b.first.keys())
            pairs = [(a.first[i], b.first[i]) for i in common]
            differ = sum(x != y for x, y in pairs)
            if len(pairs) < FEWEST_LABELS or differ < LABELS_DIFFER * len(pairs):
                continue
            at_once = all(a.epoch[i] == b.epoch[i] for i in common)
            if _maps(pairs) and (at_once or (a.stable and b.stable)):
                yield differ, len(pairs), len({x for x, _ in pairs}), same


class _Labels:
    """One column of a reader's samples.

    Attributes:
        first: digest by index, of the first time that the sample was read; `epoch` of that time.
        again: how often a sample was read again; `changed` of these times it had another digest.
    """

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.epoch: dict[int, int] = {}
        self.again = 0
        self.changed = 0

    def add(self, index: int, value: int, epoch: int) -> None:
        if index in self.first:
            self.again += 1
            self.changed += value != self.first[index]
        self.first.setdefault(index, value)
        self.epoch.setdefault(index, epoch)

    @property
    def stable(self) -> bool:
        """Whether samples keep their number from epoch to epoch."""
        return self.again >= FEWEST_KEPT and not self.changed


def _labels(reader: Reader) -> dict[Column, _Labels]:
    found: dict[Column, _Labels] = defaultdict(_Labels)
    for epoch in reader.looked:
        for read in epoch.content:
            indices = numbers_of(read.indices)
            for n, (kind, column) in enumerate(zip(read.numbers, read.columns, strict=False)):
                for index, value in zip(indices, numbers_of(column), strict=False):
                    if kind == "n":
                        found[read.numbers, n].add(index, value, epoch.number)
    return found


def _maps(pairs: list[tuple[int, int]]) -> bool:
    """Whether equal numbers of one rank are equal numbers of the other one, other ones though: what
    is random does not keep to that. Hashes may coincide on one rank only."""
    forth: dict[int, Counter[int]] = defaultdict(Counter)
    back: dict[int, Counter[int]] = defaultdict(Counter)
    for x, y in pairs:
        forth[x][y] += 1
        back[y][x] += 1
    if min(len(forth), len(back)) < 2:
        return False
    for side in (forth, back):
        again = len(pairs) - len(side)
        kept = sum(max(c.values()) - 1 for c in side.values())
        if again < FEWEST_KEPT or kept < RENUMBERED * again:
            return False
    return True
