"""Epochs under torch's `Join` that ranks with fewer batches begin after fewer steps than others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import EpochBegan, StepDone
from .replica import Member
from .replicas import Replicas, by_step


@dataclass(frozen=True)
class UnevenEpoch:
    """The first such epoch in which copies that began it equal, with equal gradients, move apart.

    Attributes:
        began: by rank, how the epoch began, after as many optimizer steps as it says.
        steps: from its begin until they were seen to differ.
        positions: of the parameters that differ then.
    """

    began: dict[int, EpochBegan]
    steps: int
    positions: tuple[int, ...]


def moved_apart(group: Replicas) -> UnevenEpoch | None:
    """What the state of an optimizer does that steps more often on some ranks: `Join` copies the
    model at its end, and nothing else."""
    if any(len({e.optimizer for e in m.rank.of(StepDone)}) > 1 for m in group.members.values()):
        return None
    epochs = {n: _joined(m) for n, m in group.members.items()}
    for key in sorted(set.intersection(*(set(e) for e in epochs.values()))):
        began = {n: e[key] for n, e in epochs.items()}
        uneven = len({e.step for e in began.values()}) > 1
        if uneven and (found := _parted(group, began)) is not None:
            return found
    return None


def _joined(member: Member) -> dict[tuple[int, int], EpochBegan]:
    return {(e.loader, e.epoch): e for e in member.rank.of(EpochBegan) if e.joined}


def _parted(group: Replicas, began: dict[int, EpochBegan]) -> UnevenEpoch | None:
    gradients = dict(_differing(group, "gradients", began))
    parameters = dict(_differing(group, "parameters", began))
    if gradients.get(0) or parameters.get(0) != ():
        return None
    return next((UnevenEpoch(began, n, differ) for n, differ in parameters.items() if differ), None)


def _differing(
    group: Replicas, kind: str, began: dict[int, EpochBegan]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """After so many steps of the epoch, the positions that differ, as long as the ranks make as
    many backwards."""
    count = len(group.names("parameters"))
    tables = {n: by_step(group.members[n], kind, count) for n in began}
    first = {n: tables[n].get(e.step, ({}, 0))[1] for n, e in began.items()}
    for steps in range(min(_taken(group.members[n], e) for n, e in began.items())):
        rows = {n: row for n, e in began.items() if (row := tables[n].get(e.step + steps))}
        if len(rows) < len(began):
            continue
        if len({made - first[n] for n, (_, made) in rows.items()}) > 1:
            return
        values = [table for table, _ in rows.values()]
        common = sorted(set.intersection(*(set(table) for table in values)))
        yield steps, tuple(p for p in common if len({table[p] for table in values}) > 1)


def _taken(member: Member, began: EpochBegan) -> int:
    """Steps from the begin of an epoch to that of the next one."""
    later = (e.step for e in member.rank.of(EpochBegan) if e.step > began.step)
    return min([*later, member.last_step + 1]) - began.step
