"""By what losses weigh their elements: unequally where a rank has few of those that count."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ...events import BatchSeen, LossMeans

UNEQUAL = 1.1
"""The largest weight of an element in a forward over the smallest from which on they are
unequal."""


def spreads(row: dict[int, LossMeans]) -> list[float]:
    """For each term of the loss, by which factor one of its elements counts more on a rank than on
    another; 0 where that is unknown."""
    events = [*row.values()]
    return [
        spread(e.weights[n] / e.elements[n] for e in events)
        if all(e.weights[n] for e in events)
        else 0.0
        for n in range(len(events[0].elements))
    ]


def weighs_unequally(row: dict[int, BatchSeen]) -> bool:
    """Whether elements count differently on two ranks."""
    return spread(map(by_element, row.values())) > UNEQUAL


def dispersion(counts: list[list[int]]) -> float:
    """The variance of the ranks' counts in a forward over their mean, on the average of all: 1 or
    less where each element counts or not with one probability."""
    return statistics.fmean(statistics.variance(row) / statistics.fmean(row) for row in counts)


def by_element(event: BatchSeen) -> float:
    """By what a loss weighs each of its elements that count."""
    return event.weight if event.reduction == "sum" else event.weight / event.valid


def spread(values: Iterable[float]) -> float:
    known = list(values)
    return max(known) / min(known)


def by_count(option: str, *, accumulates: bool) -> str:
    """What to do so that each element counts the same on all ranks.

    Args:
        option: the code that has the framework do it, where it has one.
        accumulates: several backwards belong to one optimizer step.
    """
    if accumulates:
        by_hand = (
            "reduce with `sum`, add up the number of elements that count over all micro-batches "
            "of the optimizer step before its first forward, `dist.all_reduce(count)` that, and "
            "use `loss = local_sum * world_size / count` for each micro-batch, without dividing "
            "by the number of micro-batches"
        )
    else:
        by_hand = (
            "reduce with `sum`, `dist.all_reduce(count)` the number of elements that count, and "
            "use `loss = local_sum * world_size / count`"
        )
    return f"set {option}; in a loss of your own, {by_hand}" if option else by_hand
