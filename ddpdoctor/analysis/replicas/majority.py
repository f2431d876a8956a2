"""Which ranks differ from most, where the first comparison had too few ranks to tell."""

from __future__ import annotations

from collections.abc import Mapping

Split = list[tuple[int, ...]]
"""The ranks of one look in groups that agree, the largest first."""


def settles(first: Split, later: Mapping[str, Split], size: int) -> str:
    """The later comparison that tells which ranks differ from most; empty for none.

    It is the first of those that compared the most ranks. It must compare more ranks than the
    first one did, and have more than half of all ranks in one group. All other comparisons have to
    divide their ranks as it does: otherwise ranks differ in more than one way, and it is not known
    who began.

    Args:
        size: of the whole group.
    """
    if not later:
        return ""
    widest = max(later, key=lambda when: len(_ranks(later[when])))
    whole = later[widest]
    settled = len(_ranks(whole)) > len(_ranks(first)) and 2 * len(whole[0]) > size
    agree = all(_within(whole, s) == _within(s, whole) for s in (first, *later.values()))
    return widest if settled and agree else ""


def _ranks(split: Split) -> set[int]:
    return {rank for side in split for rank in side}


def _within(split: Split, other: Split) -> set[frozenset[int]]:
    """The groups, restricted to the ranks of the other comparison."""
    ranks = _ranks(other)
    return {both for side in split if (both := frozenset(side) & ranks)}
