"""One rank's copy of a model that several ranks hold."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import Replica, StepDone, Wrapped
from ...run import Rank


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
        steps = (e.step for e in self.rank.of(StepDone) if e.optimizer == self.optimizer)
        return max(steps, default=-1)
