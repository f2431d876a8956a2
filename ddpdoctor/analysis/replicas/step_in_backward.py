"""Optimizer steps inside backward, by hooks on parameters, before DDP averages the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...events import GroupReady, SteppedInside, Wrapped
from ...events.drift import ABSENT
from ...run import Rank, Run
from .thresholds import EXCHANGED


@dataclass(frozen=True)
class Inside:
    """A model that is stepped inside backward.

    Attributes:
        last: the last record of each rank of its group.
        compared: after how many such backwards the ranks' parameters were compared.
        differ: after which of these they differed.
    """

    wrapped: Wrapped
    last: dict[Rank, SteppedInside]
    compared: list[int]
    differ: list[int]


def stepped(run: Run) -> Iterator[Inside]:
    """Models that diverge by such steps: the parameters differ at every comparison, or cannot be
    digested, and the program itself does not communicate as many elements as they have."""
    for group, model in sorted(_places(run)):
        reported: dict[Rank, dict[int, SteppedInside]] = {}
        for rank in run.ranks.values():
            records = {e.count: e for e in rank.of(SteppedInside) if e.model == model}
            if records and _group(rank, model) == group:
                reported[rank] = records
        tables = list(reported.values())
        common = sorted(set.intersection(*(set(table) for table in tables)))
        compared = [n for n in common if all(t[n].parameters != ABSENT for t in tables)]
        differ = [n for n in compared if len({t[n].parameters for t in tables}) > 1]
        last = {rank: table[max(table)] for rank, table in reported.items()}
        wrapped = next(w for w in next(iter(reported)).of(Wrapped) if w.model == model)
        size = sum(prod(p.shape) for p in wrapped.parameters if p.trainable)
        exchanged = any(e.carried >= EXCHANGED * size for e in last.values())
        if len(reported) > 1 and common and compared == differ and not exchanged:
            yield Inside(wrapped, last, compared, differ)


def _places(run: Run) -> set[tuple[tuple[int, ...], int]]:
    """(ranks of the group, model) of all records."""
    every = ((rank, e.model) for rank in run.ranks.values() for e in rank.of(SteppedInside))
    return {(_group(rank, model), model) for rank, model in every}


def _group(rank: Rank, model: int) -> tuple[int, ...]:
    """The ranks over which the model is replicated."""
    number = next((w.group for w in rank.of(Wrapped) if w.model == model), -1)
    return next((g.ranks for g in rank.of(GroupReady) if g.group == number), (rank.rank,))
