"""Evaluations that ranks share, and the numbers that are decided by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from typing import TypeAlias, TypeVar

from ...events import (
    Averaged,
    ComparedValue,
    EndDecided,
    EpochBegan,
    EpochEnded,
    MessageSize,
    MetricUsed,
    SaveDecided,
    SchedulerStep,
    Signature,
    Wrapped,
)
from ...events.operations import operation
from ...run import Location, Rank, Run
from . import data_calls
from .datasets import own_datasets
from .division import divided_loaders
from .epoch_audit import pads, partitioned
from .loaders import Epoch, Loader, Reader, loaders

ROUNDING = 1e-6
"""Relative difference up to which values count as equal."""

FEWEST = 2
"""Evaluations in which the values must differ, or one that is not the first: that may be an
accident."""

TO_FEW_RANKS = data_calls.EXCHANGES - {"all_reduce"}
"""Collectives after which one rank may know the whole result and the others not. After an
`all_reduce` the result is equal on all ranks."""

Decided: TypeAlias = SaveDecided | EndDecided


def exchanged(loader: Loader, ops: Set[str] = data_calls.EXCHANGES) -> list[bool]:
    """For each evaluation, whether some rank reduces or gathers values of its own in it or after
    it, before the next optimizer step or iteration that trains.

    Args:
        ops: the collectives that count.
    """
    count = max(len(reader.epochs) for reader in loader.readers.values())
    if any(_sends(reader.rank) for reader in loader.readers.values()):
        return [True] * count  # at which steps is not on record
    return [
        any(
            data_calls.values_exchanged(
                reader.rank, step, ops, since=epoch.began, until=_trains_next(reader.rank, epoch)
            )
            for reader in loader.readers.values()
            for epoch in reader.epochs[n : n + 1]
            for step in {epoch.began.step, epoch.began.step + epoch.steps}
        )
        for n in range(count)
    ]


def _trains_next(rank: Rank, evaluated: Epoch) -> EpochBegan | None:
    """The first iteration that trains after an evaluation: what its loss gathers is no result."""
    trained = {(e.loader, e.epoch) for e in rank.of(EpochEnded) if e.backwards}
    later = (e for e in rank.of(EpochBegan) if e.at > evaluated.began.at)
    return next((e for e in later if (e.loader, e.epoch) in trained), None)


def _sends(rank: Rank) -> bool:
    """Whether the program sends messages from rank to rank, of tensors or objects."""
    kinds = (operation(signature.op) for signature in rank.of(Signature))
    return bool(rank.of(MessageSize)) or any(kind.sends or kind.receives for kind in kinds)


def read_apart(run: Run) -> Callable[[Loader], bool]:
    """Tells loaders of which several ranks each read a share: as their sampler says, or as the
    samples show, which may be a data set of each rank's own."""
    shown = {
        id(d.loader)
        for d in divided_loaders(run)
        if any(partitioned(a) or pads(a, d.batch) for a in d.audits)
    }

    def apart(loader: Loader) -> bool:
        readers = loader.readers.values()
        shares = {r.seen.sampler_rank for r in readers if r.seen.replicas > 1}
        divided = len(shares) == len(readers) or id(loader) in shown
        return len(readers) > 1 and (divided or own_datasets([*readers]))

    return apart


def divided_evaluations(run: Run) -> list[Loader]:
    """The loaders that are read without training, on several ranks, each of which takes its share:
    the number that a program decides by tells that it evaluates."""
    return [loader for loader in filter(read_apart(run), loaders(run)) if not loader.trains]


def seen_to_evaluate(loader: Loader) -> bool:
    """Whether no gradients are computed where it is read."""
    return all(map(_evaluates, loader.readers.values()))


def unread_shares(run: Run) -> list[tuple[Loader, list[int]]]:
    """Loaders that are read to the end without training, with the ranks whose shares, by its
    sampler, no rank ever reads. Gradients may be on: forces are gradients of an energy."""
    if run.outcome() != "completed":
        return []
    found = []
    for loader in loaders(run):
        readers = loader.readers.values()
        shares = {r.seen.sampler_rank for r in readers}
        unread = sorted({*range(run.world_size)} - shares)
        # A part of the training data shows how training goes.
        divided = all(r.seen.replicas == run.world_size and not r.trains_too for r in readers)
        whole = any(e.whole for r in readers for e in r.epochs)
        if divided and unread and whole and not loader.trains:
            found.append((loader, unread))
    return found


def _evaluates(reader: Reader) -> bool:
    """Whether it is read under `no_grad`, or its batches go through a model without gradients."""
    ends = (epoch.ended for epoch in reader.epochs)
    return any(e.evaluated or not e.grad_enabled for e in ends if e is not None)


Used = TypeVar("Used", SchedulerStep, MetricUsed)


def metrics_given(run: Run, of: type[Used]) -> dict[Location, dict[int, dict[int, Used]]]:
    """What schedulers, or others that decide, are given: by the line of the call, or the line that
    logs it, by rank and number of the call there."""
    found: dict[Location, dict[int, dict[int, Used]]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(of):
            by_name = event.logged if isinstance(event, MetricUsed) else None
            line = rank.location(event.site if by_name is None else by_name.site)
            if event.metric is not None and line is not None:
                found.setdefault(line, {}).setdefault(number, {})[event.call] = event
    return found


def first_unequal(
    by_rank: Mapping[int, Mapping[int, Used]], ranks: Collection[int]
) -> tuple[int, dict[int, float | None], str] | None:
    """The first call in which the numbers of all these ranks differ, these, and in how many calls
    they do, in words; None where they differ in few."""
    common = set.intersection(*(set(calls) for calls in by_rank.values()))
    calls: dict[int, dict[int, float | None]] = {
        c: {n: m[c].metric for n, m in by_rank.items()} for c in sorted(common)
    }
    unequal = {c: values for c, values in calls.items() if _differ(values)}
    if set(by_rank) != set(ranks) or len(unequal) < FEWEST:
        return None
    call, values = next(iter(unequal.items()))
    return call, values, f"{len(unequal)} of {len(calls)}"


def evaluation_of(rank: Rank, event: Decided, evaluations: list[Loader]) -> Loader | None:
    """The evaluation that the number comes from by the program's source, if no rank exchanges
    values in it or after it. None where the number changed with another loader, too, or where its
    values on all ranks are on record and do not differ each time: they tell more."""
    for loader in evaluations:
        reader = loader.readers.get(rank.rank)
        mine = reader is not None and any(e.seen.loader == event.loader for e in reader.epochs)
        if mine and not any(exchanged(loader)):
            tables = {n: t for n, t in _tables(rank, event, loader).items() if t is not None}
            if len(tables) < len(loader.readers):
                return None
            rows = _rows(loader, tables) if all(tables.values()) else None
            return loader if rows is None or (rows and all(map(_differ, rows))) else None
    return None


def ends_apart(
    run: Run, events: Mapping[int, EndDecided], evaluations: list[Loader]
) -> Loader | None:
    """The evaluation of which each rank's own result decides when the rank stops training with the
    others; None where not all ranks decide, or values are sent from one rank in it or after it, so
    that one may decide for all."""
    number, event = next(iter(events.items()))
    loader = evaluation_of(run.ranks[number], event, evaluations)
    if loader is None or not loader.readers.keys() <= events.keys():
        return None
    together = run.any(Wrapped) or run.any(Averaged)
    return loader if together and not any(exchanged(loader, data_calls.SPREADS)) else None


def unreduced(
    rank: Rank, event: SaveDecided, evaluations: list[Loader]
) -> tuple[Loader, dict[int, float | None], int, int] | None:
    """The evaluation that the number comes from by when it changes, its values on all ranks when
    they first differ, how often they do, and of how many times; None if it is not known to differ
    by the share."""
    for loader in evaluations:
        tables = {n: t for n, t in _tables(rank, event, loader).items() if t}
        if len(tables) < len(loader.readers) or rank.rank not in tables:
            continue
        rows = _rows(loader, tables)
        unequal = [row for row in rows if _differ(row)]
        varies = all(len({*table.values()}) >= FEWEST for table in tables.values())
        ops = TO_FEW_RANKS if varies else data_calls.EXCHANGES
        steps = {step for t in tables.values() for step in t}
        if not unequal or unequal == rows[:1] or _exchanged(loader, rank, steps, ops):
            continue
        return loader, unequal[0], len(unequal), len(rows)
    return None


def _tables(rank: Rank, event: Decided, loader: Loader) -> dict[int, dict[int, float] | None]:
    """By rank of a loader and by step, the values of the number that a rank decides by, as far as
    they are on record; None for a rank where it changes with another loader, too."""
    place = rank.location(event.compared)
    found: dict[int, dict[int, float] | None] = {}
    for number, reader in loader.readers.items():
        mine = [
            e
            for e in reader.rank.of(ComparedValue)
            if e.name == event.name and reader.rank.location(e.site) == place
        ]
        theirs = {ep.seen.loader for ep in reader.epochs}
        only = all(e.loader in theirs for e in mine)
        found[number] = {e.step: e.value for e in mine} if only else None
    return found


def _rows(
    loader: Loader, tables: Mapping[int, Mapping[int, float]]
) -> list[dict[int, float | None]]:
    """The values on all ranks, at each step at which one of them changed and all of them were read
    as often: when an iteration over a loader begins, and at the end of the run."""
    began = [Counter(e.step for e in loader.readers[n].rank.of(EpochBegan)) for n in tables]
    steps = sorted({step for t in tables.values() for step in t})
    steps = [step for step in steps if len({readings[step] for readings in began}) == 1]
    rows = [{n: _at(t, step) for n, t in tables.items()} for step in steps]
    return [row for row in rows if None not in row.values()]


def _at(table: Mapping[int, float], step: int) -> float | None:
    """The value at a step, of which only changes are on record; None before the first."""
    return table[max(known)] if (known := [s for s in table if s <= step]) else None


def _exchanged(loader: Loader, rank: Rank, steps: Set[int], ops: Set[str]) -> bool:
    """Whether the rank took part in one of these collectives of the program's own after one of
    these steps and before the next, but not before it began to read the loader there."""
    began = {e.began.step: e.began for e in reversed(loader.readers[rank.rank].epochs)}
    return any(data_calls.values_exchanged(rank, s, ops, since=began.get(s)) for s in steps)


def _differ(values: Mapping[int, float | None]) -> bool:
    known = [v for v in values.values() if v is not None]
    return max(known) - min(known) > ROUNDING * max(map(abs, known)) if known else False
