"""Buffers that were added to a model after the wrap and differ between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import LateBuffers
from ...events.pack import unpack
from .replica import Member
from .replicas import Replicas

Row = dict[tuple[str, tuple[int, ...]], int]
"""Digests by name and shape: buffers whose length depends on the rank's data cannot be compared."""


@dataclass(frozen=True)
class LateBuffersDiffer:
    """Late buffers that differ at the last comparison.

    Attributes:
        steps: at which they differ.
        looked: how many comparisons there are.
        at: wall clock of the first one that differs.
    """

    names: list[str]
    steps: list[int]
    looked: int
    at: float


def differing(group: Replicas) -> LateBuffersDiffer | None:
    """The late buffers of a model that differ between ranks; None where none do."""
    tables = {n: _rows(m) for n, m in group.members.items()}
    common = sorted(set.intersection(*(set(t) for t in tables.values())))
    if not common:
        return None
    names = _differ([t[common[-1]] for t in tables.values()])
    steps = [k for k in common if not names.isdisjoint(_differ([t[k] for t in tables.values()]))]
    if not names:
        return None
    walls = (_wall(member, steps[0]) for member in group.members.values())
    return LateBuffersDiffer(sorted(names), steps, len(common), min(walls))


def _differ(rows: list[Row]) -> set[str]:
    shared = set.intersection(*(set(row) for row in rows))
    return {key[0] for key in shared if len({row[key] for row in rows}) > 1}


def _rows(member: Member) -> dict[int, Row]:
    return {
        e.step: dict(zip(zip(e.names, e.shapes, strict=False), unpack(e.values), strict=False))
        for e in _events(member)
    }


def _events(member: Member) -> list[LateBuffers]:
    mine = (member.model, member.optimizer)
    return [e for e in member.rank.of(LateBuffers) if (e.model, e.optimizer) == mine]


def _wall(member: Member, step: int) -> float:
    return next(member.rank.wall(e.at) for e in _events(member) if e.step == step)
