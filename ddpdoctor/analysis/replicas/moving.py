"""Whether parameters change between two looks at them."""

from __future__ import annotations

from .replica import Member
from .replicas import Divergence, Replicas, by_step


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
