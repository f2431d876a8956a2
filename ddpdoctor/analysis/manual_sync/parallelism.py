"""Copies beside other kinds of parallelism, which start equal, diverge with the first step, and
are never made equal again although their ranks communicate in every step."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ...events import GroupReady, Unwrapped, UnwrappedState
from ...events.drift import ABSENT, ZERO
from ...events.pack import pack, unpack
from ...run import Rank, Run
from . import unwrapped_rules as rules
from .copies import (
    Copies,
    Rows,
    agree,
    aligned,
    parting,
    same,
    states_of,
    step_of,
)
from .thresholds import ACTIVATIONS, ENOUGH, LOOKS, LOOKS_BESIDE
from .unwrapped_rules import Alone


def beside(run: Run, optimizer: int) -> Iterator[Alone]:
    """What is wrong with the models that ranks train with an optimizer beside such parallelism."""
    if groups := [g for g in _groups(run, optimizer) if _exchanged(g)]:
        members = sorted(pair for group in groups for pair in group.members.items())
        looks = [look for look in groups[0].looks if not any(s.last for s in look.values())]
        yield Alone(
            rules.DATA_PARALLEL_GROUP, Copies(dict(members), looks), looks[0],
            range(len(groups[0].names)), world=run.world_size, groups=tuple(groups),
            exchanged=max(map(_exchanged, groups)),
        )  # fmt: skip
    if (copies := _sequence_parallel(run, optimizer)) is not None:
        every = range(len(copies.names))
        yield Alone(rules.SEQUENCE_PARALLEL, copies, copies.looks[0], every, world=run.world_size)
    yield from _after_all_to_all(run, optimizer)


def _groups(run: Run, optimizer: int) -> Iterator[Copies]:
    """Copies in each group, a part of the world, over which the parameters were sent before the
    first step."""
    groups: dict[tuple[int, ...], dict[int, tuple[Rank, Unwrapped]]] = {}
    for number, rank in run.ranks.items():
        events = [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
        states = states_of(rank, optimizer)
        ranks = _members(rank).get(states[0].spread, ()) if states else ()
        if len(events) == 1 and 1 < len(ranks) < run.world_size:
            groups.setdefault(ranks, {})[number] = (rank, events[0])
    for ranks, members in groups.items():
        if len(members) == len(ranks) and len({e.parameters for _, e in members.values()}) == 1:
            tables = {
                n: {s.step: s for s in states_of(r, optimizer)} for n, (r, _) in members.items()
            }
            yield Copies(members, aligned(tables))


def _exchanged(copies: Copies) -> int:
    """Elements that a data-parallel group communicated since the first step, at most, where its
    copies diverge because these are too few; else 0."""
    looks = copies.looks
    if any(s.exchanged not in ("", "in backward") for s in copies.states) or not _diverge(looks):
        return 0
    if any(agree(look) for look in looks if not next(iter(look.values())).last):
        return 0
    numbers = [_linked(copies, n) for n in copies.members]
    # Intended local steps have nothing to communicate in each of them.
    few = min(numbers) >= step_of(looks[-1]) and max(numbers) < ENOUGH * copies.size
    return max(numbers) if few else 0


def _diverge(looks: list[Rows]) -> bool:
    enough = len(looks) >= LOOKS_BESIDE and not step_of(looks[0])
    return enough and parting(map(same, looks)) == 1


def _linked(copies: Copies, number: int) -> int:
    """How many elements a rank communicated, since the first look, in groups that contain at least
    two of these ranks."""
    members = _members(copies.members[number][0])
    begin, end = (copies.looks[k][number].numbers for k in (0, -1))
    return sum(
        count - begin.get(group, 0)
        for group, count in end.items()
        if group not in members or len(copies.members.keys() & members[group]) > 1
    )


def _members(rank: Rank) -> dict[int, tuple[int, ...]]:
    return {g.group: g.ranks for g in rank.of(GroupReady) if g.member}


def _sequence_parallel(run: Run, optimizer: int) -> Copies | None:
    """A model that all ranks train with this optimizer and no other, on one batch together through
    `all_to_all`, and whose gradients, each of a part of that batch, are never reduced.

    Experts and tables that are divided among the ranks have other parameters next to them, which
    are wrapped or synchronised, or come right after the first `all_to_all`, which then has no
    backward.
    """
    events = {n: rank.of(Unwrapped) for n, rank in run.ranks.items()}
    members = {n: (run.ranks[n], each[0]) for n, each in events.items() if len(each) == 1}
    models = {(e.optimizer, e.kind, e.wrapped, e.parameters) for _, e in members.values()}
    if len(members) < max(2, run.world_size) or len(models) > 1:
        return None
    _, event = next(iter(members.values()))
    if event.optimizer != optimizer or not event.kind or event.wrapped:
        return None
    tables = {
        n: {s.step: s for s in states_of(r, optimizer) if s.each and not s.last}
        for n, (r, _) in members.items()
    }
    copies = Copies(members, aligned(tables))
    if not _diverge(copies.looks) or step_of(copies.looks[1]) != 1 or not _only_swaps(copies):
        return None
    own = (row for h in copies.parameters for row in h.gradients)
    alone = all(len(set(row)) == len(row) or {*row} <= {ABSENT, ZERO} for row in own)
    return copies if alone else None


def _after_all_to_all(run: Run, optimizer: int) -> Iterator[Alone]:
    """Parameters of the same names and shapes on all ranks that come after the last `all_to_all` of
    the forward, while another part of the model is wrapped: each rank computes their gradients from
    samples of its own, and nothing reduces them.

    Tables and experts that are divided among the ranks get theirs from the `all_to_all` of the
    backward.
    """
    events = {
        n: [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
        for n, rank in run.ranks.items()
    }
    owned = {n: each[0] for n, each in events.items() if len(each) == 1}
    if len(owned) < max(2, run.world_size) or len({e.kind for e in owned.values()}) > 1:
        return
    if not all(e.kind and e.wrapped and not e.sharded for e in owned.values()):
        return
    shared = set.intersection(*({p.look for p in e.parameters} for e in owned.values()))
    names = {str(look[0]) for look in shared}
    for n, event in owned.items():
        names &= _local(event, states_of(run.ranks[n], optimizer))
    while names:
        members = {n: (run.ranks[n], _only(e, names)) for n, e in owned.items()}
        tables = {
            n: {s.step: _part(owned[n], s, names) for s in states_of(r, optimizer) if s.each}
            for n, (r, _) in members.items()
        }
        copies = Copies(members, aligned(tables))
        own = zip(copies.names, copies.parameters, strict=True)
        apart = {n for n, h in own if h.present and not any(h.agree) and not any(h.equal[1:])}
        if apart == names:
            break
        names = apart
    if not names or len(copies.looks) < LOOKS_BESIDE or not _reduces_nothing(copies):
        return
    every = next(iter(owned.values())).parameters
    rest = tuple(p.name for p in every if p.name not in names)
    yield Alone(
        rules.AFTER_ALL_TO_ALL, copies, copies.looks[0], range(len(names)),
        others=range(len(rest)), world=run.world_size, example=rest,
    )  # fmt: skip


def _local(event: Unwrapped, states: list[UnwrappedState]) -> set[str]:
    """The parameters whose gradients came before the `all_to_all` of the backward at every look
    after the first step, and were passed to no collective."""
    looks = [s for s in states if s.each and s.local]
    if len(looks) < LOOKS:
        return set()
    local = set.intersection(*({*unpack(s.local)} for s in looks))
    handed = {position for s in states for position in unpack(s.handed)}
    return {event.parameters[p].name for p in local - handed}


def _only(event: Unwrapped, names: set[str]) -> Unwrapped:
    """The record of some of the parameters."""
    kept = tuple(p for p in event.parameters if p.name in names)
    return msgspec.structs.replace(event, parameters=kept)


def _part(event: Unwrapped, state: UnwrappedState, names: set[str]) -> UnwrappedState:
    """What was recorded of some of the parameters."""
    rows, count = unpack(state.each), len(event.parameters)
    places = [i for i, p in enumerate(event.parameters) if p.name in names]
    gradients, values = ([rows[i + begin] for i in places] for begin in (0, count))
    return msgspec.structs.replace(
        state, each=pack([*gradients, *values]), handed="",
        gradients=hash(tuple(gradients)), parameters=hash(tuple(values)),
    )  # fmt: skip


def _reduces_nothing(copies: Copies) -> bool:
    """Whether no collective carried gradients between backward and step, nor any parameters."""
    first = copies.looks[0]
    return not any(
        s.exchanged != "all-to-all" or s.averaged != first[n].averaged
        or s.other >= ACTIVATIONS or s.late or s.shared or s.completed or s.inside or s.running
        for look in copies.looks for n, s in look.items()
    )  # fmt: skip


def _only_swaps(copies: Copies) -> bool:
    """Whether every `all_to_all` between the first two looks has a backward (then also what comes
    before the first of them is trained), and no collective carried gradients between backward and
    step, nor any parameters."""
    first, second = copies.looks[:2]
    for n, before in first.items():
        swaps = zip(before.swaps or (0, 0), second[n].swaps or (0, 0), strict=True)
        there, back = (after - begin for begin, after in swaps)
        if not there == back > 0:
            return False
    return not any(
        s.exchanged != "all-to-all" or s.averaged != first[n].averaged
        or s.handed or s.other or s.late or s.shared or s.completed or s.inside or s.running
        for look in copies.looks for n, s in look.items()
    )  # fmt: skip
