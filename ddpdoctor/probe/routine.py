"""Steps like the ones before: one forward, one backward that averages, one step, at known lines.

Most steps of most programs are such. In them nothing is to be learned about which backward belongs
to which model or whether the gradients that are applied were averaged, and what is not learned
costs nothing. At the first sign of anything else (`stop`) those who were left out are told what
has happened in this step so far, and the rest of it is looked at as any other.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import moments
from .gradients import NO_GRADIENT
from .moments import Backward, Forward
from .recorder import Recorder

if TYPE_CHECKING:
    from .models import Model
    from .optimizers import Optimizer

FIRST = 128
"""Steps of an optimizer that are looked at like any other."""

ALIKE, MOST_ALIKE = 2, 64
"""Steps in a row that must have been alike before one is expected to be; twice as many whenever one
was not, up to the most."""


class Stage:
    """How far a routine step has come. Plain numbers: looking up an enum's member takes longer."""

    NONE = 0
    FORWARD = 1
    FORWARD_DONE = 2
    BACKWARD = 3
    BACKWARD_DONE = 4
    STEP = 5


@dataclass(slots=True)
class Expected:
    """A routine step.

    Attributes:
        wrapper: of the model.
        forward, backward: the same objects for every such step. `backward.looks` is empty.
        sequence: torch's count of the group's collectives before the backward; before: identity
            and version of the first gradient then.
    """

    model: Model
    wrapper: weakref.ref[Any]
    optimizer: Optimizer
    forward: Forward
    backward: Backward
    sequence: int = -1
    before: tuple[int, int] = NO_GRADIENT


class Routine:
    """Whether the next step, or the one that is running, is a routine one.

    Attributes:
        expected: it is, or may be.
        trail: what happened since the last step: model and line of each forward and backward that
            may be part of a routine step, None for any other.
    """

    def __init__(self) -> None:
        self.expected: Expected | None = None
        self.stage = Stage.NONE
        self.trail: list[tuple[Model, int] | None] = []
        self._shape: tuple[Any, ...] = ()
        self._alike = 0
        self._enough = ALIKE
        self._broken = False

    def note(self, part: tuple[Model, int] | None) -> None:
        """A forward with gradients, or a backward, that was looked at."""
        if len(self.trail) <= 2:  # more than two are no routine
            self.trail.append(part)

    def learn(self, optimizer: Optimizer, site: int) -> None:
        """A step that was looked at is over: whether the next is expected to be like it."""
        trail, self.trail = self.trail, []
        forward, backward = trail if len(trail) == 2 else (None, None)
        shape: tuple[Any, ...] = ()
        if forward is not None and backward is not None and forward[0] is backward[0]:
            shape = (forward[0], optimizer, forward[1], backward[1], site)
        self._alike = self._alike + 1 if shape and shape == self._shape else 0
        self._shape = shape
        if self._alike >= self._enough and optimizer.steps >= FIRST:
            self._expect(*shape)

    def _expect(
        self, model: Model, optimizer: Optimizer, forward_site: int, backward_site: int, _: int
    ) -> None:
        forward = Forward(model, None, forward_site, True, True, (), {})
        backward = Backward(0, backward_site, (), 0.0, models=[model])
        backward.expected_sync[model.number] = True
        if model.wrapper is not None:
            self.expected = Expected(model, model.wrapper, optimizer, forward, backward)

    def pause(self) -> None:
        """The next step is looked at more closely, although it is expected to be like the last."""
        if self.stage == Stage.NONE:
            self.expected = None

    def stop(self, active: Recorder) -> None:
        """It is not what was expected: tell those who were left out of what has passed."""
        if self.stage == Stage.BACKWARD:
            self._broken = True  # as soon as that is over
        elif self.expected is not None:
            self._interrupt(active)

    def settle(self, active: Recorder, *, broken: bool = False) -> None:
        """The end of a backward was told: stop, if that is still to be done."""
        if broken or self._broken:
            self._interrupt(active)

    def _interrupt(self, active: Recorder) -> None:
        if self.stage != Stage.NONE:
            self._enough = min(2 * self._enough, MOST_ALIKE)
        if self.stage >= Stage.FORWARD_DONE:
            moments.interrupted.happens(active, self)
        self.expected, self.stage = None, Stage.NONE
        self._alike, self._broken = 0, False

    def averaged(self, model: Model) -> bool:
        """Whether the gradients of a model were averaged in this step, if it is a routine one."""
        step = self.expected
        if step is None or step.model is not model or self.stage < Stage.BACKWARD_DONE:
            return False
        return model.number in step.backward.synced


routine = Routine()


def forget() -> None:
    """Expect nothing any more."""
    routine.__init__()  # type: ignore[misc]
