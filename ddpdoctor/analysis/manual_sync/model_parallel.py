"""Copies in a data-parallel group next to tensor parallelism: they start equal, and the group never
makes them equal again, although it communicates something (losses) in every step."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...events import GroupReady, Unwrapped, UnwrappedState
from ...run import Rank, Run

ENOUGH = 0.5
"""Share of the parameters' elements that must be communicated to make them equal once."""

LOOKS_AT_LEAST = 4


@dataclass(frozen=True)
class ModelParallel:
    """A group over which the parameters were sent before the first step.

    Attributes:
        alike: by rank, its record of the model.
        steps: at which all ranks were examined.
        exchanged: elements communicated since the first step, at most.
    """

    alike: dict[Rank, Unwrapped]
    steps: list[int]
    exchanged: int


def apart(run: Run, optimizer: int) -> list[ModelParallel]:
    """The groups, each a part of the world, whose copies diverge."""
    groups: dict[tuple[int, ...], dict[Rank, Unwrapped]] = {}
    for rank in run.ranks.values():
        events = [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
        states = _states(rank, optimizer)
        ranks = _members(rank).get(states[0].spread, ()) if states else ()
        if len(events) == 1 and 1 < len(ranks) < run.world_size:
            groups.setdefault(ranks, {})[rank] = events[0]
    every = (_judged(ranks, alike, optimizer) for ranks, alike in groups.items())
    return [found for found in every if found is not None]


def _judged(
    ranks: tuple[int, ...], alike: dict[Rank, Unwrapped], optimizer: int
) -> ModelParallel | None:
    if len(alike) < len(ranks) or len({e.parameters for e in alike.values()}) > 1:
        return None
    tables = {rank: _states(rank, optimizer) for rank in alike}
    if any(s.exchanged not in ("", "in backward") for states in tables.values() for s in states):
        return None
    rows = {rank: {s.step: s for s in states} for rank, states in tables.items()}
    common = sorted(set.intersection(*(set(r) for r in rows.values())))
    if len(common) < LOOKS_AT_LEAST or common[0]:
        return None
    for step in common:
        looks = [r[step] for r in rows.values()]
        equal = len({s.parameters for s in looks}) == 1
        agree = len({s.gradients for s in looks}) == 1 and not looks[0].last
        if agree or equal is not (step == 0):
            return None
    numbers = [_linked(rank, ranks, states) for rank, states in tables.items()]
    size = sum(prod(p.shape) for p in next(iter(alike.values())).parameters)
    if min(numbers) < common[-1] or max(numbers) >= ENOUGH * size:
        return None  # intended local steps have nothing to communicate in each of them
    steps = [n for n in common if not any(r[n].last for r in rows.values())]
    return ModelParallel(alike, steps, max(numbers))


def _linked(rank: Rank, ranks: tuple[int, ...], states: list[UnwrappedState]) -> int:
    """How many elements were communicated, since the first look, in groups that contain at least
    two of these ranks."""
    members = _members(rank)
    begin, end = states[0].numbers, states[-1].numbers
    return sum(
        count - begin.get(group, 0)
        for group, count in end.items()
        if group not in members or len(set(members[group]).intersection(ranks)) > 1
    )


def _members(rank: Rank) -> dict[int, tuple[int, ...]]:
    return {g.group: g.ranks for g in rank.of(GroupReady) if g.member}


def _states(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    found = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
    return sorted(found, key=lambda s: (s.step, s.last))
