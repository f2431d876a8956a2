"""What the data loaders show about the rounds of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ...events import (
    EpochBegan,
    EpochEnded,
    Hyperparameters,
    IndicesRead,
    LoaderSeen,
    OptimizerSeen,
)
from ...run import Location, Rank
from ..calls.call_logs import CallRecord

Leaver = tuple[Rank, float]
"""A rank, and until when its events count: it may have continued after a call that failed. In
seconds on the rank's clock."""


@dataclass(frozen=True)
class Iteration:
    """One epoch of a loader on a rank.

    Attributes:
        loader: its line and number, which are the same on all ranks.
    """

    loader: tuple[str, int]
    began: EpochBegan
    ended: EpochEnded | None

    @property
    def exhausted(self) -> bool:
        return self.ended is not None and self.ended.exhausted


def until_call(made: CallRecord) -> Leaver:
    """The rank of a call, and when that began."""
    return made.rank, made.call.began if made.call else inf


def is_last(same: Iteration, mine: list[Iteration]) -> bool:
    """Whether nothing but an evaluation follows an epoch: all later ones are over other loaders,
    began when it had ended, and contain no backward.

    Args:
        same: the epoch; mine: all epochs of the rank, `same` included.
    """
    over = same.ended.at if same.ended else inf
    return all(
        i.loader != same.loader and i.began.at >= over and not (i.ended and i.ended.backwards)
        for i in mine[mine.index(same) + 1 :]
    )


def iterations_of(leaver: Leaver, loop: Location | None) -> list[Iteration]:
    """The epochs of the loaders that a loop runs over; of all loaders where `loop` is None."""
    rank, until = leaver
    made = {e.loader: (str(rank.location(e.site)), e.made) for e in rank.of(LoaderSeen)}
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded) if e.at <= until}
    found = []
    for event in rank.of(EpochBegan):
        spot = rank.location(event.site)
        here = loop is None or (spot and (spot.file, spot.line) == (loop.file, loop.line))
        if here and event.at <= until:
            key = made.get(event.loader, ("", event.loader))
            found.append(Iteration(key, event, ends.get((event.loader, event.epoch))))
    return found


def keeps_no_state(rank: Rank) -> bool:
    """Whether its optimizers keep nothing beside the parameters, as SGD does without momentum:
    `Join` makes only the parameters equal."""
    moves = any(g.get("momentum") for e in rank.of(Hyperparameters) for g in e.groups)
    return not moves and all(e.kind == "SGD" for e in rank.of(OptimizerSeen))


def skipped_in(leaver: Leaver, iterations: list[Iteration]) -> int:
    """Batches without a backward, in epochs in which others had one, as far as is on record."""
    rank, until = leaver
    skipped = 0
    for iteration in iterations:
        number = iteration.began.loader, iteration.began.epoch
        read = (e for e in reversed(rank.of(IndicesRead)) if (e.loader, e.epoch) == number)
        reported = iteration.ended or next((e for e in read if e.at <= until), None)
        if reported is not None and reported.backwards:
            last = reported is not iteration.ended  # its last batch may still get a backward
            skipped += max(0, reported.batches - reported.backwards - last)
    return skipped


def steps_taken(leaver: Leaver) -> str:
    """For how many batches a rank took a step in the last epoch in which it skipped one, as `3 of
    its 6`; `some` if unknown."""
    rank, until = leaver
    ended = [e for e in rank.of(EpochEnded) if e.exhausted and 0 < e.backwards < e.batches]
    ended = [e for e in ended if e.at <= until]
    return f"{ended[-1].backwards} of its {ended[-1].batches}" if ended else "some"
