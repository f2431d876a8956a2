"""Batches that ranks took no step for, in iterations in which others left out fewer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ...events import ExceptionPassed
from ...report.findings import Related, Steps
from ...run import Location, Rank, ranks_text
from .caught_exceptions import caught_text
from .loop_rounds import Iteration, Leaver, iterations_of, skipped_in

Caught = tuple[Rank, tuple[ExceptionPassed, ...]]


@dataclass(frozen=True)
class SkippedBatches:
    """What the loader of a loop says of it.

    Attributes:
        epochs: rank to the number of iterations in which it left out more batches than another.
        caught: what these ranks caught meanwhile, where that is why: something each time, and in
            no other iteration.
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
                return (Related("the exception came out of this line, and was caught there", spot),)
        return ()

    def before(self, ranks: Iterable[int]) -> str:
        """What came before the last iteration in which these ranks did."""
        earlier = {r: n - (r in ranks) for r, n in sorted(self.epochs.items())}
        reported = [f"{ranks_text([r])} in {n} {_epochs(n)}" for r, n in earlier.items() if n]
        return (
            f"; batches were skipped before by {' and '.join(reported)}, from which on steps for "
            "different batches met"
            if reported
            else ""
        )


def skips(leavers: list[Leaver], loop: Location) -> SkippedBatches:
    """Of the iterations over the loaders of a loop that several of these ranks did."""
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
    """What the program caught and went on, each once."""
    end = min(iteration.ended.at if iteration.ended else inf, until)
    found = {
        (e.kind, e.message, e.step): e
        for e in rank.of(ExceptionPassed)
        if iteration.began.at <= e.at <= end and e.where != "unwinding"
    }
    return list(found.values())


def _epochs(count: int) -> str:
    return "epoch" if count == 1 else "epochs"
