"""One rank's copy of a model that several ranks hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from ...events import EpochBegan, EpochEnded, Event, Loaded, Replica, StepDone, Wrapped
from ...run import Location, Rank

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Member:
    """One rank's copy: its own numbers of the model and the optimizer."""

    rank: Rank
    seen: Replica
    wrapped: Wrapped

    @property
    def model(self) -> int:
        return self.seen.model

    @property
    def optimizer(self) -> int:
        return self.seen.optimizer

    @property
    def last_step(self) -> int:
        """Of the optimizer, -1 where it took none."""
        return max((e.step for e in self.of(StepDone)), default=-1)

    def of(self, kind: type[E], /, **fields: object) -> list[E]:
        """The events about this copy: of its model and its optimizer, as far as the event says, and
        with these values in other fields."""
        wanted = {"model": self.model, "optimizer": self.optimizer, **fields}
        named = {n: v for n, v in wanted.items() if n in kind.__struct_fields__}
        return [e for e in self.rank.of(kind) if all(getattr(e, n) == v for n, v in named.items())]

    def loads(self, what: str) -> list[Loaded]:
        """The loads of weights or of a state into this copy."""
        without_wrapper = self.optimizer if self.model < 0 else -1
        return self.of(Loaded, what=what, optimizer=without_wrapper)

    def line(self, kind: type[E], /, **fields: object) -> Location | None:
        """The first known line in such events."""
        spots = (self.rank.location(getattr(e, "site", -1)) for e in self.of(kind, **fields))
        return next((spot for spot in spots if spot is not None), None)

    def batches_joined(self) -> dict[tuple[int, int], tuple[str, int]]:
        """By loader and epoch, the batches of each iteration that began under torch's `Join`; where
        it did not end, the optimizer steps before it."""
        ended = {(e.loader, e.epoch): ("batches", e.batches) for e in self.rank.of(EpochEnded)}
        joined = (e for e in self.rank.of(EpochBegan) if e.joined)
        began = {(e.loader, e.epoch): ("steps", e.step) for e in joined}
        return {key: ended.get(key, steps) for key, steps in began.items()}


def equal_inputs(members: Collection[Member]) -> bool:
    """Whether ranks are known to have had as many batches in each epoch under torch's `Join`, which
    then does nothing. Steps tell nothing: a sharded optimizer takes those of the other ranks."""
    epochs = [member.batches_joined() for member in members]
    return any(epochs) and all(mine == epochs[0] for mine in epochs)
