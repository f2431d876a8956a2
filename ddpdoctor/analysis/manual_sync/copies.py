"""Models without a wrapper of which several ranks train copies, and the states of these copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import msgspec

from ...events import GroupReady, Unwrapped, UnwrappedState
from ...run import Rank, Run

BESIDE = ("gradients of a group", "point-to-point", "all-to-all", "in backward")
"""Kinds of communication (`UnwrappedState.exchanged`) that a group may have with other ranks."""

NONE: frozenset[int] = frozenset()

Rows = dict[int, UnwrappedState]
"""States of one moment by global rank, or of one rank by step."""


@dataclass(frozen=True)
class Copies:
    """One model as every rank of a group trains it.

    Attributes:
        members: by rank, its record of the model.
        looks: the states of all ranks before the same steps, ascending.
        end: the states when the run was over; None where a rank has none, or the ranks took
            different numbers of steps.
        part: whether the group is a part of the world.
        ends: the states when the run was over, of the ranks that have one.
    """

    members: dict[int, tuple[Rank, Unwrapped]]
    looks: list[Rows]
    end: Rows | None
    part: bool = False
    ends: Rows = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many elements the parameters have, all together."""
        return sum(prod(p.shape) for p in next(iter(self.members.values()))[1].parameters)

    @property
    def last(self) -> Rows:
        return self.end or self.looks[-1]


def trained_copies(run: Run) -> Iterator[Copies]:
    """The models that every rank of the world, or of the one group to which it passes all
    gradients, trains with an optimizer over equal lists of parameters.

    An optimizer whose list changes is left out: its counts begin anew.
    """
    world = frozenset(range(run.world_size))
    optimizers = {e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}
    for optimizer in sorted(optimizers) if run.world_size > 1 else ():
        members = {}
        for number, rank in run.ranks.items():
            events = [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
            if len(events) == 1:
                members[number] = (rank, events[0])
        groups = {n: _group(rank, optimizer) for n, (rank, _) in members.items()}
        for ranks in (world, *sorted({*groups.values()} - {world, NONE}, key=min)):
            mine = {n: m for n, m in members.items() if ranks in (world, groups[n])}
            held = {tuple((p.shape, p.dtype) for p in e.parameters) for _, e in mine.values()}
            if len(mine) == len(ranks) > 1 and len(held) == 1:
                yield _looked(mine, optimizer, part=ranks != world)


def _group(rank: Rank, optimizer: int) -> frozenset[int]:
    """The ranks of the group that all gradients are passed to, if that is not the default group."""
    last = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer][-1:]
    return members_of(rank, last[0].group) if last and last[0].group else NONE


def members_of(rank: Rank, group: int) -> frozenset[int]:
    """The ranks of a group; empty where it is not known."""
    return next((frozenset(g.ranks) for g in rank.of(GroupReady) if g.group == group), NONE)


def _within(ranks: frozenset[int], rank: Rank, state: UnwrappedState, part: bool) -> UnwrappedState:
    """The state as it counts for these ranks: synchronisation within another group does not count,
    nor does communication with none of these ranks."""
    if members_of(rank, state.group) != ranks if state.group else part:
        return msgspec.structs.replace(state, complete=False, completed=0)
    alone = state.group and ranks.isdisjoint(state.partners) and -1 not in state.partners
    if alone and state.exchanged in BESIDE:
        return msgspec.structs.replace(state, exchanged="gradients")
    return state


def _looked(members: dict[int, tuple[Rank, Unwrapped]], optimizer: int, *, part: bool) -> Copies:
    ranks = frozenset(members)
    tables: dict[int, Rows] = {}
    ends: Rows = {}
    for number, (rank, _) in members.items():
        found = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
        states = [_within(ranks, rank, s, part) for s in found]
        tables[number] = {s.step: s for s in states if not s.last}
        ends.update((number, s) for s in states if s.last)
    common = sorted(set.intersection(*(set(t) for t in tables.values())))
    looks = [{n: t[step] for n, t in tables.items()} for step in common]
    whole = len(ends) == len(members) and len({s.step for s in ends.values()}) == 1
    return Copies(members, looks, ends if whole else None, part, ends)


def step_of(look: Rows) -> int:
    """The step before which a look was taken."""
    return next(iter(look.values())).step


def same(look: Rows) -> bool:
    """Whether the parameters are equal on all ranks."""
    return len({s.parameters for s in look.values()}) == 1
