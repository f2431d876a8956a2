"""Epochs that have samples of an earlier one of the same rank, and whether that is meant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ...events import Loaded, LoaderSeen, OptimizerSeen, StepDone, Wrapped
from ...run import Rank, Run
from .loaders import Epoch, Reader, in_order, loaders

FEWEST_OF_REST = 16
"""Samples of a rank that are hardly all in another epoch of that rank by chance."""


def read_on(run: Run, rank: int, reader: Reader) -> tuple[Epoch, Epoch] | None:
    """The rest of an epoch with which a run goes on, which may have a loader of its own, and a
    later epoch that has all its samples, although each epoch has others."""
    before = [_trained(reader.earlier)]
    for other in loaders(run):
        mine = other.readers.get(rank)
        if mine is not None and mine is not reader and _like(mine.seen, reader.seen):
            before.append(
                [e for e in _trained(mine.epochs) if e.began.at <= reader.epochs[0].began.at]
            )
    epochs = sorted([*itertools.chain(*before), *_trained(reader.epochs)], key=lambda e: e.began.at)
    if not epochs:
        return None
    rest, *others = epochs
    own = {*rest.indices}
    if rest.sampled > 1 or len(own) < FEWEST_OF_REST or rest.ended is None or in_order(rest.ended):
        return None
    longer = [e for e in others if e.samples > rest.samples and e.sampled == 1]
    has = [(e, own <= {*e.indices}) for e in longer]
    shuffles = reader.seen.shuffle is True and reader.seen.replicas > 1
    shuffles |= any(not found for _, found in has)
    later = next((e for e, found in has if found), None)
    if later is None or later.ended is None or not shuffles:
        return None
    count = min(len(rest.ended.head), len(later.ended.head))
    if rest.ended.head[:count] == later.ended.head[:count]:
        return None  # an epoch that was left early begins anew
    again = begins_anew(reader.rank, rest, later) or goes_back(reader.rank, rest, later)
    return None if again else (rest, later)


def _trained(epochs: Iterable[Epoch]) -> list[Epoch]:
    return [e for e in epochs if e.trained and e.exhausted]


def _like(one: LoaderSeen, other: LoaderSeen) -> bool:
    return (one.dataset, one.length) == (other.dataset, other.length)


def begins_anew(rank: Rank, old: Epoch, new: Epoch) -> bool:
    """Whether another model is trained in `new`: a model was wrapped since `old` began, or, in a
    program without wrappers, all optimizers that step in `new` took their first step there."""
    start, wrapped = new.began.at, rank.of(Wrapped)
    if wrapped:
        return any(old.began.at < e.at < start for e in wrapped)
    first = {e.optimizer: e.at for e in rank.of(OptimizerSeen)}
    steps = (e.optimizer for e in rank.of(StepDone) if start < e.at <= end_of(new))
    taken = [first.get(optimizer, 0.0) for optimizer in steps]
    return min(taken, default=0.0) > start


def goes_back(rank: Rank, old: Epoch, new: Epoch) -> bool:
    """Whether weights were loaded between two epochs: the second may repeat the first on purpose,
    from an earlier state."""
    return any(e.what == "weights" and end_of(old) < e.at < new.began.at for e in rank.of(Loaded))


def end_of(epoch: Epoch) -> float:
    return epoch.ended.at if epoch.ended is not None else epoch.began.at
