"""Models of plain tensors that the program itself splits over a group of ranks.

Such ranks exchange activations inside the backward, and some of their parameters differ from the
start: each holds a part of the layer. The others they hold alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...events import GroupReady, MeshModel, Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...run import Rank, Run
from .mesh_models import END, GROUP, SHARDED, Look, MeshCopies

IN_BACKWARD = "in backward"
"""What `UnwrappedState.exchanged` says of ranks that exchange activations."""

Members = dict[int, tuple[Rank, Unwrapped]]
Looks = dict[int, dict[int, Look]]


def split_models(run: Run) -> Iterator[MeshCopies]:
    """The models that a process group holds in parts."""
    for optimizer in sorted({e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}):
        members: Members = {}
        for number, rank in run.ranks.items():
            events = [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
            if len(events) == 1 and events[0].parameters:
                members[number] = rank, events[0]
        for ranks in _groups(members, optimizer):
            mine = {n: members[n] for n in sorted(ranks)}
            looks = _looks(mine, optimizer)
            if looks and (found := _split(mine, looks)) is not None:
                yield MeshCopies(found, looks)


def _groups(members: Members, optimizer: int) -> list[frozenset[int]]:
    """The groups whose ranks exchange activations with each other."""
    found: dict[frozenset[int], None] = {}
    for rank, _ in members.values():
        for group in rank.of(GroupReady):
            ranks = frozenset(group.ranks)
            if group.member and len(ranks) > 1 and ranks <= members.keys():
                found[ranks] = None
    return [
        ranks
        for ranks in found
        if all(_exchanges(members[n][0], optimizer, ranks - {n}) for n in ranks)
        and len({_form(members[n][1]) for n in ranks}) == 1
    ]


def _exchanges(rank: Rank, optimizer: int, others: frozenset[int]) -> bool:
    states = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
    return bool(states) and all(
        s.exchanged == IN_BACKWARD and others == set(s.partners) and not any(s.swaps)
        for s in states
    )


def _form(event: Unwrapped) -> tuple[object, ...]:
    return tuple((p.name, p.shape, p.dtype) for p in event.parameters)


def _looks(members: Members, optimizer: int) -> Looks:
    tables: dict[int, dict[int, Look]] = {}
    for number, (rank, event) in members.items():
        count = len(event.parameters)
        table = tables[number] = {}
        for state in rank.of(UnwrappedState):
            if state.optimizer == optimizer and state.each:
                values = unpack(state.each)
                step = END if state.last else state.step
                table[step] = Look(values[:count], values[count:], ())
    common = set.intersection(*(set(table) for table in tables.values()))
    return {step: {n: table[step] for n, table in tables.items()} for step in sorted(common)}


def _split(members: Members, looks: Looks) -> dict[int, tuple[Rank, MeshModel]] | None:
    """The records of the model as those of a mesh of one dimension; None where no rank holds
    another part than the others."""
    first = next(iter(looks.values()))
    _, event = next(iter(members.values()))
    names = [p.name for p in event.parameters]
    apart = {
        name.rpartition(".")[0]
        for n, name in enumerate(names)
        if len({look.values[n] for look in first.values()}) > 1
    }
    if not apart:
        return None
    # The bias of a layer that is split begins with zeros everywhere, and is split like its weight.
    placed = tuple(SHARDED if name.rpartition(".")[0] in apart else "-" for name in names)
    return {
        number: (
            rank,
            MeshModel(
                at=one.at,
                optimizer=one.optimizer,
                kind=one.kind,
                site=one.site,
                dims=(GROUP,),
                sizes=(len(members),),
                ranks=tuple(members),
                names=tuple(names),
                shapes=tuple(p.shape for p in one.parameters),
                placed=placed,
                split=(GROUP,),
                parted=False,
                step_site=one.step_site,
            ),
        )
        for number, (rank, one) in members.items()
    }
