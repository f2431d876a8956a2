"""Models without a wrapper of which several ranks train copies, and what each look recorded of
them: the whole model, and the history of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TypeVar

import msgspec

from ...events import AbsentGradients, GroupReady, Unwrapped, UnwrappedState
from ...events.drift import ABSENT, ZERO
from ...events.pack import unpack
from ...run import Rank, Run
from .thresholds import ENOUGH, LOOKS

BESIDE = ("gradients of a group", "point-to-point", "all-to-all", "in backward")
"""Kinds of communication (`UnwrappedState.exchanged`) that a group may have with other ranks."""

NONE: frozenset[int] = frozenset()

Rows = dict[int, UnwrappedState]
"""States of one moment by global rank (a look), or of one rank by step."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class History:
    """One parameter at the looks that recorded each parameter: by look and rank.

    Attributes:
        gradients: digests of its gradient.
        values: digests of itself.
        passed: whether the rank passed the gradient to a collective individually.
        unclipped: digests of its gradient before torch clipped it after the exchange.
    """

    gradients: list[tuple[int, ...]]
    values: list[tuple[int, ...]]
    passed: list[tuple[bool, ...]]
    unclipped: list[tuple[int, ...]] = field(default_factory=list)

    @cached_property
    def synced(self) -> list[bool]:
        """By look, whether the gradient is equal on all ranks, or was before it was clipped."""
        before = [len(set(row)) == 1 for row in self.unclipped] or self.agree
        return [now or then for now, then in zip(self.agree, before, strict=True)]

    @cached_property
    def agree(self) -> list[bool]:
        """By look, whether the gradient is equal on all ranks."""
        return [len(set(row)) == 1 for row in self.gradients]

    @cached_property
    def equal(self) -> list[bool]:
        """By look, whether the parameter is equal on all ranks."""
        return [len(set(row)) == 1 for row in self.values]

    @cached_property
    def present(self) -> bool:
        """Whether every rank has a gradient at every look."""
        return all(ABSENT not in row for row in self.gradients)

    @property
    def trained(self) -> bool:
        """Whether every rank always has a gradient, which is not always zero on the first rank."""
        return self.present and any(row[0] != ZERO for row in self.gradients)

    @property
    def moved(self) -> bool:
        """Whether the first rank's parameter changes between two looks."""
        return len({row[0] for row in self.values}) > 1

    @property
    def handed(self) -> bool:
        """Whether any rank passed the gradient to a collective individually, at any look."""
        return any(map(any, self.passed))


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
        absences: by rank, the records of which parameters have no gradient, by step.
    """

    members: dict[int, tuple[Rank, Unwrapped]]
    looks: list[Rows]
    end: Rows | None = None
    part: bool = False
    ends: Rows = field(default_factory=dict)
    absences: dict[int, dict[int, AbsentGradients]] = field(default_factory=dict)

    @property
    def first(self) -> tuple[Rank, Unwrapped]:
        """The first rank, and its record of the model."""
        return next(iter(self.members.values()))

    @cached_property
    def names(self) -> list[str]:
        return [p.name for p in self.first[1].parameters]

    @cached_property
    def sizes(self) -> list[int]:
        """How many elements each parameter has."""
        return [prod(p.shape) for p in self.first[1].parameters]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def last(self) -> Rows:
        return self.end or self.looks[-1]

    @property
    def states(self) -> Iterator[UnwrappedState]:
        """The states of all looks and ranks."""
        return (state for look in self.looks for state in look.values())

    @cached_property
    def close(self) -> list[Rows]:
        """The looks for which every rank recorded one digest per parameter."""
        return [look for look in self.looks if all(s.each for s in look.values())]

    @cached_property
    def parameters(self) -> list[History]:
        """What the close looks recorded, by parameter."""
        count = len(self.names)
        rows = [[unpack(s.each) for s in look.values()] for look in self.close]
        passed = [[set(unpack(s.handed)) for s in look.values()] for look in self.close]
        unclipped = [[unpack(s.unclipped or s.each) for s in look.values()] for look in self.close]
        return [
            History(
                [tuple(row[i] for row in look) for look in rows],
                [tuple(row[count + i] for row in look) for look in rows],
                [tuple(i in own for own in look) for look in passed],
                [tuple(row[i] for row in look) for look in unclipped],
            )
            for i in range(count)
        ]

    @cached_property
    def accounted(self) -> bool:
        """Whether at every close look `History.passed` tells of all that collectives carried: what
        else they carried is too little to be any other gradient."""
        for k, look in enumerate(self.close):
            others = [
                n for n, h in zip(self.sizes, self.parameters, strict=True) if not any(h.passed[k])
            ]
            if any(s.other >= min(others, default=1) for s in look.values()):
                return False
        return True

    @cached_property
    def steady(self) -> bool:
        """Whether all ranks synchronised most gradients of every step, and no parameters since the
        first."""
        first, ends = self.looks[0] if self.looks else {}, self.end or {}
        return (
            len(self.close) >= LOOKS
            and all(s.exchanged == "gradients" and s.shared == s.step + 1 for s in self.states)
            and all(s.averaged == first[n].averaged for k in self.looks for n, s in k.items())
            and all(s.averaged == first[n].averaged for n, s in ends.items())
        )

    @cached_property
    def agreed(self) -> bool:
        """Whether gradients were equal on all ranks at every look, and new each time, and enough
        was communicated in each step to make them so, by whatever means: there may be no
        backward."""
        looks = range(len(self.close))
        if len(looks) < LOOKS or not all(all(h.agree) for h in self.parameters):
            return False
        rows = {tuple(h.gradients[k][0] for h in self.parameters) for k in looks}
        return len(rows) == len(looks) and all(
            s.elements >= ENOUGH * self.size * s.step for s in self.looks[-1].values()
        )

    @cached_property
    def kept_equal(self) -> bool:
        """Whether manual synchronisation was seen to work: every rank passed all gradients of all
        steps between two looks to collectives, and the parameters moved and were equal at both."""
        for before, after in pairwise(self.looks):
            if not (same(before) and same(after)):
                return False
            steps = step_of(after) - step_of(before)
            whole = all(s.completed - before[n].completed == steps for n, s in after.items())
            if whole and moved(before, after):
                return True
        return False

    @cached_property
    def agree_from_start(self) -> bool:
        """Whether every gradient is equal on all ranks at all looks, the first one before any
        step."""
        enough = len(self.close) >= LOOKS and not step_of(self.close[0])
        return enough and all(all(h.agree) for h in self.parameters)


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
            if len(mine) == len(ranks) > 1 and len({form(e) for _, e in mine.values()}) == 1:
                yield _looked(mine, optimizer, part=ranks != world)


def form(event: Unwrapped) -> tuple[object, ...]:
    """Shapes and types of the parameters: equal for models that may be copies."""
    return tuple((p.shape, p.dtype) for p in event.parameters)


def states_of(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    """What a rank recorded before the steps of an optimizer, and at the end of the run."""
    return [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]


def members_of(rank: Rank, group: int) -> frozenset[int]:
    """The ranks of a group; empty where it is not known."""
    return next((frozenset(g.ranks) for g in rank.of(GroupReady) if g.group == group), NONE)


def aligned(tables: Mapping[K, Mapping[int, T]]) -> list[dict[K, T]]:
    """From what each rank recorded by step: what all of them recorded at the same steps."""
    common = set.intersection(*map(set, tables.values()))
    return [{key: table[step] for key, table in tables.items()} for step in sorted(common)]


def step_of(look: Rows) -> int:
    """The step before which a look was taken."""
    return next(iter(look.values())).step


def same(look: Rows) -> bool:
    """Whether the parameters are equal on all ranks."""
    return len({s.parameters for s in look.values()}) == 1


def agree(look: Rows) -> bool:
    """Whether the gradients are equal on all ranks."""
    return len({s.gradients for s in look.values()}) == 1


def moved(before: Rows, after: Rows) -> bool:
    """Whether the parameters of all ranks changed between two looks."""
    return all(s.parameters != before[n].parameters for n, s in after.items())


def parting(equal: Iterable[bool]) -> int | None:
    """Where copies diverge for good, from whether they are equal at each look: the first look from
    which they never are; None where they are equal in the end, or again in between."""
    row: Sequence[bool] = list(equal)
    first = row.index(False) if False in row else len(row)
    return None if first == len(row) or any(row[first:]) else first


def _group(rank: Rank, optimizer: int) -> frozenset[int]:
    """The ranks of the group that all gradients are passed to, if that is not the default group."""
    last = states_of(rank, optimizer)[-1:]
    return members_of(rank, last[0].group) if last and last[0].group else NONE


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
        states = [_within(ranks, rank, s, part) for s in states_of(rank, optimizer)]
        tables[number] = {s.step: s for s in states if not s.last}
        ends.update((number, s) for s in states if s.last)
    whole = len(ends) == len(members) and len({s.step for s in ends.values()}) == 1
    absences = {
        n: {e.step: e for e in rank.of(AbsentGradients) if e.optimizer == optimizer}
        for n, (rank, _) in members.items()
    }
    return Copies(members, aligned(tables), ends if whole else None, part, ends, absences)
