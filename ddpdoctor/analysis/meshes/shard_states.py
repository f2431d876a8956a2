"""Optimizer states of one rank's shards that other ranks have loaded for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import ShardStates
from ...events.pack import unpack
from ...run import Rank, Run

ZEROS = 1
"""The digest of a state that is all zeros; that of no state is less."""

FEWEST = 2
"""Parameters whose states are compared."""


@dataclass(frozen=True)
class SameStates:
    """Ranks that hold other shards of the parameters, but the same state for them.

    Attributes:
        ranks: their records, by rank.
        names: of the parameters compared.
    """

    ranks: dict[Rank, ShardStates]
    names: tuple[str, ...]


def same_states(run: Run) -> Iterator[SameStates]:
    """One for each load of an optimizer after which this is so."""
    loads: dict[tuple[int, int], dict[Rank, ShardStates]] = {}
    for rank in run.ranks.values():
        for event in rank.of(ShardStates):
            loads.setdefault((event.optimizer, event.step), {})[rank] = event
    for found in loads.values():
        first, *others = found.values()
        for event in others:
            if event.names != first.names:
                continue
            values = zip(unpack(first.values), unpack(event.values), strict=True)
            states = zip(unpack(first.states), unpack(event.states), strict=True)
            apart = [
                (name, *pair)
                for name, (one, other), pair in zip(first.names, values, states, strict=True)
                if one != other and min(pair) > ZEROS
            ]
            if len(apart) >= FEWEST and all(mine == theirs for _, mine, theirs in apart):
                yield SameStates(found, tuple(name for name, *_ in apart))
                break
