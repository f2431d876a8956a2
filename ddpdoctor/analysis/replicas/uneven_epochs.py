"""Epochs under torch's `Join` that ranks begin after different numbers of optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...events import EpochBegan, StepDone
from .replica import Member
from .replicas import Replicas, by_step


@dataclass(frozen=True)
class UnevenEpoch:
    """The first such epoch in which copies that were equal at its begin diverge, although their
    gradients agree.

    Attributes:
        number: of the epoch, among those of its loader under `Join`.
        began: by rank, the record of its begin.
        steps: from the begin until the parameters were seen to differ.
        positions: of the parameters that differ then.
    """

    number: int
    began: dict[int, EpochBegan]
    steps: int
    positions: tuple[int, ...]


def diverging(group: Replicas) -> UnevenEpoch | None:
    """The epoch in which unequal optimizer state makes the copies diverge: `Join` broadcasts the
    model at its end, and nothing else."""
    if any(len({e.optimizer for e in m.rank.of(StepDone)}) > 1 for m in group.members.values()):
        return None
    epochs = {n: _joined_epochs(m) for n, m in group.members.items()}
    for key in sorted(set.intersection(*(set(e) for e in epochs.values()))):
        began = {n: e[key] for n, e in epochs.items()}
        uneven = len({e.step for e in began.values()}) > 1
        if uneven and (found := _diverging(group, key[1], began)) is not None:
            return found
    return None


def _joined_epochs(member: Member) -> dict[tuple[int, int], EpochBegan]:
    """The epochs under `Join` by loader and number: ranks may iterate it to evaluate, too."""
    counts: Counter[int] = Counter()
    found: dict[tuple[int, int], EpochBegan] = {}
    for event in member.rank.of(EpochBegan):
        if event.joined:
            found[event.loader, counts[event.loader]] = event
            counts[event.loader] += 1
    return found


def _diverging(group: Replicas, number: int, began: dict[int, EpochBegan]) -> UnevenEpoch | None:
    gradients = dict(_differing(group, "gradients", began))
    parameters = dict(_differing(group, "parameters", began))
    if gradients.get(0) or parameters.get(0) != ():
        return None
    parted = ((steps, differ) for steps, differ in parameters.items() if differ)
    return next((UnevenEpoch(number, began, *found) for found in parted), None)


def _differing(
    group: Replicas, kind: str, began: dict[int, EpochBegan]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """By steps since the begin of the epoch, the positions that differ, as long as all ranks run
    equally many backwards."""
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
    """Optimizer steps from the begin of an epoch to that of the next one."""
    later = (e.step for e in member.rank.of(EpochBegan) if e.step > began.step)
    return min([*later, member.last_step + 1]) - began.step
