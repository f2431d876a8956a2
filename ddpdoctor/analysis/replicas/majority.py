"""Who stands apart, where the ranks that were compared at first do not tell."""

from __future__ import annotations

from collections.abc import Mapping

Split = list[tuple[int, ...]]
"""The ranks of one look in groups that agree, the largest first."""


def settles(first: Split, later: Mapping[str, Split], size: int) -> str:
    """Which of the later looks tells who stands apart of so many ranks, empty for none.

    It is the first of those that compared the most ranks, more than at first, and has most of all
    ranks on one side: fewer than that may be half of them. All other looks have to divide their
    ranks as it does. Else ranks part in more than one way, and who began it is not known.
    """
    if not later:
        return ""
    widest = max(later, key=lambda when: len(_ranks(later[when])))
    whole = later[widest]
    settled = len(_ranks(whole)) > len(_ranks(first)) and 2 * len(whole[0]) > size
    alike = all(_within(whole, s) == _within(s, whole) for s in (first, *later.values()))
    return widest if settled and alike else ""


def _ranks(split: Split) -> set[int]:
    return {rank for side in split for rank in side}


def _within(split: Split, other: Split) -> set[frozenset[int]]:
    """The groups, as far as the ranks of the other look go."""
    ranks = _ranks(other)
    return {both for side in split if (both := frozenset(side) & ranks)}
