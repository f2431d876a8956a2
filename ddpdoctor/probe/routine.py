"""Steps like the ones before: one forward, one backward that averages, one step, at known lines.

Most steps of most programs are such. In them nothing is to be learned about which backward belongs
to which model or whether the gradients that are applied were averaged, and what is not learned
costs nothing. At the first sign of anything else (`stop`) those who were left out are told what
has happened in this step so far, and the rest of it is looked at as any other.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ring import Phase
from . import moments
from .gradients import NO_GRADIENT
from .moments import Backward, Forward
from .recorder import Recorder
from .torch_private import interposed, joins, without_modes

if TYPE_CHECKING:
    from .models import Model
    from .optimizers import Optimizer
    from .tape import Tape

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
        sampled: reference to one of the model's parameters.
        tape: of the recorder; `in_forward` and so on put the phase on record, given the time.
        sequence: torch's count of the group's collectives before the backward; before: identity
            and version of the first gradient then.
    """

    model: Model
    wrapper: weakref.ref[Any]
    optimizer: Optimizer
    forward: Forward
    backward: Backward
    sampled: weakref.ref[Any]
    tape: Tape
    in_forward: Callable[[float], None]
    after_forward: Callable[[float], None]
    in_backward: Callable[[float], None]
    after_backward: Callable[[float], None]
    in_step: Callable[[float], None]
    after_step: Callable[[float], None]
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

    def learn(self, active: Recorder, optimizer: Optimizer, site: int) -> None:
        """A step that was looked at is over: whether the next is expected to be like it."""
        trail, self.trail = self.trail, []
        forward, backward = trail if len(trail) == 2 else (None, None)
        shape: tuple[Any, ...] = ()
        if forward is not None and backward is not None and forward[0] is backward[0]:
            shape = (forward[0], optimizer, forward[1], backward[1], site)
        self._alike = self._alike + 1 if shape and shape == self._shape else 0
        self._shape = shape
        if self._alike >= self._enough and optimizer.steps >= FIRST and active.tape is not None:
            self._expect(active.tape, *shape)

    def _expect(
        self, tape: Tape, model: Model, optimizer: Optimizer, in_forward: int, in_backward: int,
        in_step: int,
    ) -> None:  # fmt: skip
        wrapper, entering = model.wrapper, tape.ring.entering
        if wrapper is None or joins(wrapper()):
            return
        self.expected = Expected(
            model,
            wrapper,
            optimizer,
            Forward(model, None, in_forward, True, True, (), {}),
            Backward(0, in_backward, (), 0.0, models=[model], expected_sync={model.number: True}),
            model.sampled[0],
            tape,
            entering(Phase.FORWARD, in_forward),
            entering(Phase.USER, in_forward),
            entering(Phase.BACKWARD, in_backward),
            entering(Phase.USER, in_backward),
            entering(Phase.OPTIMIZER, in_step),
            entering(Phase.USER, in_step),
        )

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

    def hasten(self) -> None:
        """Have those who wait for a step told of this one."""
        if self.expected is not None:
            self.expected.optimizer.due_at = 0

    def give_up(self) -> None:
        """Expect nothing for the rest of the run."""
        self.expected, self.stage, self._enough = None, Stage.NONE, sys.maxsize

    def averaged(self, model: Model) -> bool:
        """Whether the gradients of a model were averaged in this step, if it is a routine one."""
        step = self.expected
        if step is None or step.model is not model or self.stage < Stage.BACKWARD_DONE:
            return False
        return model.number in step.backward.synced


routine = Routine()


class Usual:
    """Brackets a call of routine steps (see `around`): what fails in it is counted, and from then
    on no step is a routine one.

    Args:
        begins: (recorder, args, kwargs) a token, None where this is not what comes next.
        ends: (recorder, token, result).
    """

    __slots__ = ("begins", "ends")

    def __init__(
        self, part: str, lost: str, begins: Callable[..., Any], ends: Callable[..., None]
    ) -> None:
        clock = time.perf_counter_ns

        def failed(active: Recorder, error: Exception) -> None:
            routine.give_up()
            active.trouble(part, error, lost)

        def begin(active: Recorder, args: Any, kwargs: Any) -> Any:
            if routine.expected is None:
                return None
            began = clock()
            try:
                if interposed.compiler() is not None:
                    return None
                if interposed.functions() or interposed.dispatches():
                    with without_modes():
                        return begins(active, args, kwargs)
                return begins(active, args, kwargs)
            except Exception as error:
                return failed(active, error)
            finally:
                active.own_ns += clock() - began

        def end(active: Recorder, token: Any, result: Any) -> None:
            began = clock()
            try:
                ends(active, token, result)
            except Exception as error:
                failed(active, error)
            finally:
                active.own_ns += clock() - began

        self.begins, self.ends = begin, end


def forget() -> None:
    """Expect nothing any more."""
    routine.__init__()  # type: ignore[misc]
