"""Models and optimizers under one number on all ranks.

Each rank counts its own. Ranks that wrap another model besides, or train one more optimizer, count
differently, and what belongs to one model would be taken for another's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache

import msgspec

from ..events import Event, GroupReady, OptimizerSeen, Wrapped
from .rank import Rank

Numbers = Mapping[int, int]
"""A rank's own number to the one that all ranks share."""


def numbered_alike(ranks: Mapping[int, Rank]) -> dict[int, Rank]:
    """The ranks with one numbering of models and optimizers; a rank that counts differently comes
    as a copy."""
    models = _common({r: _models(rank) for r, rank in ranks.items()})
    seen = {r: _optimizers(rank, models[r]) for r, rank in ranks.items()}
    optimizers = _common(seen) if _tellable(seen) else {r: {} for r in ranks}
    return {r: _renumbered(rank, models[r], optimizers[r]) for r, rank in ranks.items()}


def _models(rank: Rank) -> dict[int, Hashable]:
    """The n-th model of each group of ranks is one model: its constructor is a collective."""
    groups = {g.group: g.ranks for g in rank.of(GroupReady)}
    keys = [(w.model, (w.wrapper, groups.get(w.group, ()))) for w in rank.of(Wrapped)]
    return _counted(dict(keys).items())


def _optimizers(rank: Rank, models: Numbers) -> dict[int, Hashable]:
    keys = [
        (o.optimizer, (o.kind, tuple(models.get(m, m) for m in o.models), o.parameters))
        for o in rank.of(OptimizerSeen)
    ]
    return _counted(dict(keys).items())


def _counted(keyed: Iterable[tuple[int, Hashable]]) -> dict[int, Hashable]:
    """Keys made unique: the first, the second, ... with that key."""
    counts: Counter[Hashable] = Counter()
    found: dict[int, Hashable] = {}
    for number, key in keyed:
        found[number] = key, counts[key]
        counts[key] += 1
    return found


def _tellable(seen: Mapping[int, Mapping[int, Hashable]]) -> bool:
    """Whether optimizers can be matched by what they hold. They cannot where each rank trains its
    own part of a model with the same number of them: there the order decides."""
    keys = {frozenset(mine.values()) for mine in seen.values() if mine}
    return len(keys) == 1 or len({len(k) for k in keys}) > 1


def _common(keyed: Mapping[int, Mapping[int, Hashable]]) -> dict[int, dict[int, int]]:
    """Equal keys get equal numbers: that of the first rank, where it is free."""
    numbers: dict[Hashable, int] = {}
    taken: set[int] = set()
    for number, key in ((n, k) for mine in keyed.values() for n, k in mine.items()):
        if key not in numbers:
            numbers[key] = number if number not in taken else max(taken) + 1
            taken.add(numbers[key])
    return {r: {n: numbers[key] for n, key in mine.items()} for r, mine in keyed.items()}


def _renumbered(rank: Rank, models: Numbers, optimizers: Numbers) -> Rank:
    if all(a == b for numbers in (models, optimizers) for a, b in numbers.items()):
        return rank
    other = copy.copy(rank)
    other.replace_events(lambda event: _told_as(event, models, optimizers))
    return other


def _told_as(event: Event, models: Numbers, optimizers: Numbers) -> Event:
    changed: dict[str, object] = {}
    for name in _numbers_in(type(event)):
        value = getattr(event, name)
        if name == "models":
            changed[name] = tuple(models.get(m, m) for m in value)
        else:
            changed[name] = (models if name == "model" else optimizers).get(value, value)
    return msgspec.structs.replace(event, **changed) if changed else event


@lru_cache(maxsize=256)
def _numbers_in(kind: type[Event]) -> tuple[str, ...]:
    return tuple({"model", "models", "optimizer"} & set(kind.__struct_fields__))
