"""Whether parameters, or an optimizer's state, change between two looks at them, and which ranks
keep the state."""

from __future__ import annotations

from ...events.drift import ABSENT
from .replica import Member
from .replicas import Divergence, Replicas, by_step, divergence, kinds


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


def divided(group: Replicas) -> str:
    """The optimizer state that each rank keeps for a part of the parameters only; empty for none.

    Every rank lacks some that another keeps: where one has it all, the others lack it for another
    reason. So they do where the rank has had no gradient and its parameter differs; if it is equal,
    the rank that keeps the state sends it.
    """
    count = len(group.names("parameters"))
    for kind in kinds(group, "state:"):
        tables = {n: by_step(m, kind, count) for n, m in group.members.items()}
        for key in set.intersection(*(set(t) for t in tables.values())):
            rows = {n: table[key][0] for n, table in tables.items()}
            lacking = {n: {p for p, v in row.items() if v == ABSENT} for n, row in rows.items()}
            if not _parts(lacking) or not all(any(row.values()) for row in rows.values()):
                continue
            if _parts({n: lacks - _untrained(group, n, key) for n, lacks in lacking.items()}):
                return kind.partition(":")[2]
    return ""


def _parts(lacking: dict[int, set[int]]) -> bool:
    """Whether each rank lacks something that not all ranks lack."""
    nowhere = set.intersection(*lacking.values())
    return all(lacks > nowhere for lacks in lacking.values())


def _untrained(group: Replicas, rank: int, key: int) -> set[int]:
    """The parameters that a rank had no gradient of at the steps examined before a moment, and that
    differ between ranks."""
    names, apart = group.names("parameters"), divergence(group, "parameters")
    seen: dict[int, list[int]] = {names.index(name): [] for name in apart.names} if apart else {}
    for kind in ("gradients", "local"):
        for step, (row, _) in by_step(group.members[rank], kind, len(names)).items():
            for position in seen.keys() & row.keys() if step < key else ():
                seen[position].append(row[position])
    return {p for p, values in seen.items() if values and not any(values)}
