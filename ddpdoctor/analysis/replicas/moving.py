"""Whether parameters, or an optimizer's state, change between two looks at them."""

from __future__ import annotations

from ...events.drift import ABSENT
from .replica import Member
from .replicas import Divergence, Replicas, by_step, divergence, divided


def moved(group: Replicas, found: Divergence) -> bool:
    """Whether any parameter whose gradients differ has changed since they first did."""
    names = group.names("parameters")
    rows = by_step(group.any, "parameters", len(names))
    tables = {k: table for k, (table, _) in rows.items() if k >= found.first}
    before = tables.pop(found.first, {})
    positions = [p for p in map(names.index, found.names) if p in before]
    return any(table.get(p, before[p]) != before[p] for table in tables.values() for p in positions)


def changes(member: Member, position: int, count: int) -> bool:
    """Whether one parameter of an optimizer changes between two looks.

    Args:
        position: of the parameter, among `count` of the optimizer.
    """
    tables = [table for table, _ in by_step(member, "parameters", count).values()]
    return len({table[position] for table in tables if position in table}) > 1


def kept_by_one(group: Replicas, found: Divergence) -> bool:
    """Whether each tensor of a state that differs is kept by one rank, which updates the parameter
    and sends it to the others: at some time each rank held a part of the state only, or the tensor
    changes on one rank alone. The others may hold one that was loaded, and that nobody uses. The
    parameters stay equal.
    """
    names = group.names("parameters")
    apart = divergence(group, "parameters")
    if apart is not None and not {*apart.names}.isdisjoint(found.names):
        return False
    if divided(group) == found.kind.partition(":")[2]:
        return True
    rows = [by_step(m, found.kind, len(names)) for m in group.members.values()]
    looks = [k for k in sorted(set.intersection(*map(set, rows))) if k >= found.first]
    positions = [names.index(name) for name in found.names]
    return all(
        sum(len({row[k][0].get(p, ABSENT) for k in looks}) > 1 for row in rows) == 1
        for p in positions
    )
