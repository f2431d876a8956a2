"""Batches for which ranks took no optimizer step, in epochs in which others skipped fewer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ...events import ExceptionPassed
from ...report.findings import Related, Steps
from ...run import Location, Rank, counted, listed, ranks_text
from .caught_exceptions import caught_text
from .loop_rounds import Iteration, Leaver, iterations_of, skipped_in

Caught = tuple[Rank, tuple[ExceptionPassed, ...]]


@dataclass(frozen=True)
class SkippedBatches:
    """What the loader of a loop shows about skipped batches.

    Attributes:
        epochs: rank to the number of epochs in which it skipped more batches than another rank.
        caught: the exceptions that these ranks caught in them, where that is why: one each time,
            and none in any other epoch.
    """

    epochs: dict[int, int]
    caught: tuple[Caught, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.epochs))

    @property
    def steps(self) -> Steps | None:
        return Steps.of(e.step for _, events in self.caught for e in events)

    @property
    def why(self) -> str:
        """`rank 1 caught ValueError: odd (data.py:12) in step 1 and 2 more`; empty if unknown."""
        return "; ".join(caught_text(rank, events) for rank, events in self.caught)

    @property
    def tried(self) -> tuple[Related, ...]:
        """Where the program caught it."""
        for rank, events in self.caught:
            if (spot := rank.location(events[0].tried)) is not None:
                return (Related("the exception left this line and was caught here", spot),)
        return ()

    def before(self, ranks: Iterable[int]) -> str:
        """Who skipped batches before the last epoch in which these ranks did; empty for none."""
        earlier = {r: n - (r in ranks) for r, n in sorted(self.epochs.items())}
        before = [f"{ranks_text([r])} in {counted(n, 'epoch')}" for r, n in earlier.items() if n]
        return (
            f"; batches were skipped before by {listed(before)}, and from then on ranks "
            "synchronised steps of different batches"
            if before
            else ""
        )


def skips(leavers: list[Leaver], loop: Location) -> SkippedBatches:
    """Who skipped batches of a loop, in the epochs of its loaders that all of these ranks did."""
    every = {
        leaver[0].rank: {_key(i): (i, skipped_in(leaver, [i])) for i in iterations_of(leaver, loop)}
        for leaver in leavers
    }
    common = set.intersection(*(set(found) for found in every.values())) if every else set()
    least = {key: min(found[key][1] for found in every.values()) for key in common}
    epochs: dict[int, int] = {}
    caught: list[Caught] = []
    explained = True
    for rank, until in leavers:
        mine: list[ExceptionPassed] = []
        for key in common:
            iteration, count = every[rank.rank][key]
            seen = _caught_in(rank, iteration, until)
            more = count - least[key]
            explained = explained and bool(seen) == bool(more) and len(seen) <= more
            epochs[rank.rank] = epochs.get(rank.rank, 0) + bool(more)
            mine += seen
        if mine:
            caught.append((rank, tuple(sorted(mine, key=lambda e: e.at))))
    epochs = {rank: count for rank, count in epochs.items() if count}
    return SkippedBatches(epochs, tuple(caught) if explained else ())


def _key(iteration: Iteration) -> object:
    return iteration.loader, iteration.began.epoch


def _caught_in(rank: Rank, iteration: Iteration, until: float) -> list[ExceptionPassed]:
    """The exceptions after which the program continued in that epoch, each once."""
    end = min(iteration.ended.at if iteration.ended else inf, until)
    found = {
        (e.kind, e.message, e.step): e
        for e in rank.of(ExceptionPassed)
        if iteration.began.at <= e.at <= end and e.where != "unwinding"
    }
    return list(found.values())
