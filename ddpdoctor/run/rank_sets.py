"""Ranks by what they have in common."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

from ..events import GroupReady


def members(group: GroupReady) -> frozenset[int]:
    """The ranks of a process group. Ranks that did the same share the set."""
    return _as_set(group.ranks)


@lru_cache(maxsize=1024)
def _as_set(ranks: tuple[int, ...]) -> frozenset[int]:
    return frozenset(ranks)


def equal_ranks(values: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """The ranks in groups of equal values, the largest first."""
    groups: dict[Hashable, list[int]] = {}
    for number, value in values.items():
        groups.setdefault(value, []).append(number)
    return sorted((tuple(g) for g in groups.values()), key=lambda g: (-len(g), g))


def odd_ones(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of such groups, the ranks that are not as most others; all of them where there is no
    majority."""
    majority = len(groups) == 1 or len(groups[0]) > len(groups[1])
    return tuple(sorted(r for g in (groups[1:] if majority else groups) for r in g))
