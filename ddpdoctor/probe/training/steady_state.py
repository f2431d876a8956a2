"""Steps like the ones before: the same forwards and backwards of one model, and the same optimizers
that step after them, at the same lines.

Most steps of most programs are such. In them nothing is to be learned about which backward belongs
to which model or whether the gradients that are applied were averaged, and what is not learned
costs nothing. At the first sign of anything else (`stop`) those who were left out are told what
has happened in this step so far, and the rest of it is looked at as any other.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ...storage.call_ring import RingWriter
from ..collectives.call_log import CallLog, Recurring
from ..recording.hooks import Hook
from ..recording.recorder import Recorder
from ..recording.torch_compat import interposed, joins
from ..tensors.gradient_versions import NO_GRADIENT
from .records import Backward, Forward, Optimizer, Step
from .tracked_model import Model

FIRST = 64
"""Steps of an optimizer that are looked at like any other."""

ALIKE, MOST_ALIKE = 2, 64
"""Steps in a row that must have been alike before one is expected to be; twice as many whenever one
was not, up to the most."""


MOST_PASSES = 64
"""Forwards and backwards of a routine step."""


class Stage:
    """How far a routine step has come. Plain numbers: looking up an enum's member takes longer."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    BETWEEN = 3
    STEP = 4


class ObservedCall(NamedTuple):
    """A forward, a backward or an optimizer's step as it was looked at.

    Attributes:
        of: the model, or the optimizer.
        sync: the forward told DDP to average, or the backward did.
    """

    kind: type[Forward] | type[Backward] | type[Step]
    of: Any
    site: int
    sync: bool


@dataclass(slots=True)
class PlannedCall:
    """A forward, a backward or an optimizer's step in a routine step, the others are None; the same
    object in every routine step.

    Attributes:
        backward: its `looks` are empty.
        sync: as in `ObservedCall`; pending: forwards that wait for their backward, before it.
        hook: names it to `Sites.caller`.
        depth, code, instruction: of the user's frame that was in it last; moved: that is not the
            one before.
        call: what the model does by itself in it.
        following: the next one, None for the last.
    """

    forward: Forward | None
    backward: Backward | None
    optimizer: Optimizer | None
    site: int
    sync: bool
    pending: int
    hook: str
    call: Recurring | None
    depth: int = 0
    code: CodeType | None = None
    instruction: int = -1
    moved: bool = True
    following: PlannedCall | None = None

    def frame(self, recorder: Recorder) -> FrameType | None:
        """The user's frame in this call; None where it is at another line than is expected."""
        try:
            frame = sys._getframe(self.depth)
        except ValueError:
            return self._meet(recorder)
        if frame.f_code is not self.code or frame.f_lasti != self.instruction:
            return self._meet(recorder)
        self.moved = False
        return frame

    def _meet(self, recorder: Recorder) -> FrameType | None:
        frame, site = recorder.sites.caller(self.hook)
        self.moved = True
        if frame is None or site != self.site:
            return None
        depth, above = 0, sys._getframe(1)
        while above is not frame and above.f_back is not None:
            depth, above = depth + 1, above.f_back
        self.depth, self.code, self.instruction = depth, frame.f_code, frame.f_lasti
        return frame


@dataclass(slots=True)
class Plan:
    """A routine step.

    Attributes:
        wrapper: of the model; sampled: reference to one of its parameters.
        tape: of the recorder, with its ring.
        syncs: backwards that average.
        first, next: of its passes, and the one that is to come.
        averaged: the last backward of this step did.
        sequence: torch's count of the group's collectives before the backward; before: identity
            and version of the first gradient then.
    """

    model: Model
    wrapper: weakref.ref[Any]
    sampled: weakref.ref[Any]
    call_log: CallLog
    ring: RingWriter
    syncs: int
    first: PlannedCall
    next: PlannedCall
    averaged: bool = False
    sequence: int = -1
    before: tuple[int, int] = NO_GRADIENT

    def examined(self) -> bool:
        """Whether one of the backwards of the step that begins may be one to examine."""
        return self.model.examined_within(self.syncs)

    def observe_next_step(self) -> None:
        """As in `SteadyState`."""
        one: PlannedCall | None = self.next
        while one is not None and one.optimizer is None:
            one = one.following
        if one is not None and one.optimizer is not None:
            one.optimizer.due_at = 0

    def passed(self) -> list[PlannedCall]:
        """The forwards and backwards of this step that are over, and that nothing has been made of
        yet by an optimizer."""
        found: list[PlannedCall] = []
        one = self.first
        while one is not self.next and one.following is not None:
            found = [] if one.optimizer is not None else [*found, one]
            one = one.following
        return found


interrupted: Hook[Plan] = Hook("interrupted")
"""A step that began as a routine one is none: what has passed of it is still to be told."""


class SteadyState:
    """Whether the next step, or the one that is running, is a routine one.

    Attributes:
        expected: it is, or may be.
        history: the forwards and backwards that may be part of a routine step, and the optimizers'
            steps after them; None for any other forward or backward.
    """

    def __init__(self) -> None:
        self.expected: Plan | None = None
        self.stage = Stage.NONE
        self.history: list[ObservedCall | None] = []
        self._last: list[ObservedCall | None] = []
        self._alike = 0
        self._repeats_needed = ALIKE
        self._broken = False

    def observe(self, seen: ObservedCall | None) -> None:
        """A forward with gradients, or a backward, that was looked at."""
        last = self.history[-1] if self.history else None
        if last is not None and last.kind is Step:  # another routine step begins
            self._alike = self._alike + 1 if self.history == self._last else 0
            self._last, self.history = self.history, []
        if len(self.history) <= MOST_PASSES:  # more are no routine
            self.history.append(seen)

    def learn(self, recorder: Recorder, optimizer: Optimizer, site: int) -> None:
        """An optimizer's step that was looked at is over: whether it ends a routine step, and the
        next is expected to be like it."""
        if len(self.history) <= MOST_PASSES:
            self.history.append(ObservedCall(Step, optimizer, site, False))
        enough = self._alike + 1 >= self._repeats_needed and optimizer.steps >= FIRST
        if enough and recorder.call_log is not None and self.history == self._last:
            self._expect(recorder.call_log, self.history)

    def _expect(self, log: CallLog, history: list[ObservedCall | None]) -> None:
        seen = _may_repeat(history)
        wrapper = seen[0].of.wrapper if seen else None
        if wrapper is None or joins(wrapper()):
            return
        first = _passes(seen, log)
        syncs = sum(one.sync for one in seen if one.kind is Backward)
        model = seen[0].of
        sampled = model.sampled[0]
        self.expected = Plan(model, wrapper, sampled, log, log.ring, syncs, first, first)

    def pause(self) -> None:
        """The next step is looked at more closely, although it is expected to be like the last."""
        if self.stage == Stage.NONE:
            self.expected = None

    def stop(self, recorder: Recorder) -> None:
        """It is not what was expected: tell those who were left out of what has passed."""
        if self.stage == Stage.BACKWARD:
            self._broken = True  # as soon as that is over
        else:
            self._interrupt(recorder)

    def settle(self, recorder: Recorder, *, broken: bool) -> None:
        """The end of a backward was told: stop, if that is still to be done."""
        if broken or self._broken:
            self._interrupt(recorder)

    def _interrupt(self, recorder: Recorder) -> None:
        if self.expected is None:
            return
        if self.stage != Stage.NONE:
            self._repeats_needed = min(2 * self._repeats_needed, MOST_ALIKE)
            interrupted.fire(recorder, self.expected)
        self.expected, self.stage, self.history = None, Stage.NONE, []
        self._alike, self._broken = 0, False

    def observe_next_step(self) -> None:
        """Have those who wait for a step told of the next one."""
        if self.expected is not None:
            self.expected.observe_next_step()

    def give_up(self) -> None:
        """Expect nothing for the rest of the run."""
        self.expected, self.stage, self._repeats_needed = None, Stage.NONE, sys.maxsize

    def averaged(self, model: Model) -> bool:
        """Whether the last backward averaged a model's gradients, in a routine step."""
        step = self.expected
        return step is not None and step.model is model and step.averaged


def _may_repeat(history: list[ObservedCall | None]) -> list[ObservedCall]:
    """The history, if a step of these may be a routine one: each backward is of all the forwards
    since the one before, and averages if the last of them asked for it; so does the last one, and
    only then do optimizers step. Else nothing."""
    seen = [one for one in history if one is not None]
    if len(seen) != len(history) or len(seen) > MOST_PASSES:
        return []
    model, asked, pending, stepping = seen[0].of, False, 0, False
    for kind, of, _, sync in seen:
        if kind is Step:
            stepping = True
            if pending or not asked:
                return []
        elif stepping or of is not model:
            return []
        elif kind is Forward:
            asked, pending = sync, pending + 1
        elif not pending or sync != asked:
            return []
        else:
            pending = 0
    return seen


def _passes(history: list[ObservedCall], log: CallLog) -> PlannedCall:
    """The passes of a step, linked; the first of them."""
    passes: list[PlannedCall] = []
    pending = 0
    for kind, of, site, sync in history:
        forward = Forward(of, None, site, True, sync, (), {}) if kind is Forward else None
        backward = Backward(0, site, (), 0.0, models=[of]) if kind is Backward else None
        if backward is not None:
            backward.expected_sync[of.number] = sync
        optimizer = of if kind is Step else None
        hook = f"{len(passes)} of a routine step"
        does = "DDP forward" if forward else "DDP backward"
        call = log.recurring(of.group, does, of.number) if optimizer is None else None
        passes.append(PlannedCall(forward, backward, optimizer, site, sync, pending, hook, call))
        pending = pending + 1 if kind is Forward else 0
    for one, following in itertools.pairwise(passes):
        one.following = following
    return passes[0]


steady_state = SteadyState()


class FastPath:
    """Brackets a call of routine steps (see `around`): what fails in it is counted, and from then
    on no step is a routine one.

    Args:
        begins: (recorder, args, kwargs) a token, None where this is not what comes next. The user's
            modes are in place (see `call_without_modes`).
        ends: (recorder, token, result).
    """

    __slots__ = ("begins", "ends")

    def __init__(
        self, part: str, lost: str, begins: Callable[..., Any], ends: Callable[..., None]
    ) -> None:
        clock = time.perf_counter_ns

        def failed(recorder: Recorder, error: Exception) -> None:
            steady_state.give_up()
            recorder.trouble(part, error, lost)

        def begin(recorder: Recorder, args: Any, kwargs: Any) -> Any:
            if steady_state.expected is None:
                return None
            began = clock()
            try:
                if interposed.compiler() is not None:
                    return None
                return begins(recorder, args, kwargs)
            except Exception as error:
                return failed(recorder, error)
            finally:
                recorder.own_ns += clock() - began

        def end(recorder: Recorder, token: Any, result: Any) -> None:
            began = clock()
            try:
                ends(recorder, token, result)
            except Exception as error:
                failed(recorder, error)
            finally:
                recorder.own_ns += clock() - began

        self.begins, self.ends = begin, end


def forget() -> None:
    """Expect nothing any more."""
    steady_state.__init__()  # type: ignore[misc]
