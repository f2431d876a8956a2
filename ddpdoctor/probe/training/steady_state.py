"""The fast path: steps that repeat the ones before, with the same forwards and backwards of one
model, and the same optimizer steps after them, at the same lines.

Most steps of most programs are such. Nothing new can be learned from them about which backward
belongs to which model, or whether gradients were averaged; so most watchers are not called. When
anything else happens (`stop`), those watchers get what has passed of the step so far (the hook
`interrupted`), and the rest of the step takes the ordinary path.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ...events.timing import LONG_S
from ...storage.call_ring import Phase
from ..collectives.call_log import CallLog
from ..collectives.group_log import Recurring
from ..collectives.timed_ring import TimedRing
from ..recording.hooks import Hook
from ..recording.recorder import Recorder
from ..recording.torch_compat import (
    joins,
    sequence_number,
    sequence_of_backend,
    several_backends,
)
from ..tensors.tensor_watch import NO_TENSOR
from .limits import ALIKE, FAST_PATH_AFTER, MOST_ALIKE, MOST_CALLS
from .records import Backward, Forward, Optimizer, Step
from .tracked_model import Model

_DATA, _USER = int(Phase.DATA), int(Phase.USER)  # plain numbers, see `Stage`

DEEP = 1 << 30
"""Deeper than any stack: `sys._getframe` raises ValueError."""


class Stage:
    """How far a step on the fast path has come. Plain numbers: an enum's members are slower."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    BETWEEN = 3
    STEP = 4


class ObservedCall(NamedTuple):
    """A forward, a backward or an optimizer step that was observed on the ordinary path.

    Attributes:
        of: the model, or the optimizer.
        sync: a forward after which DDP is to synchronise, or a backward that did.
    """

    kind: type[Forward] | type[Backward] | type[Step]
    of: Any
    site: int
    sync: bool


@dataclass(slots=True)
class PlannedCall:
    """One call of a step on the fast path. The object is reused in every such step.

    Attributes:
        forward, backward, optimizer: which of these it is; the others are None.
        sync: a forward after which DDP is to synchronise, or a backward that does.
        pending: forwards that wait for their backward when it begins.
        hook: its name for `Sites.caller`.
        call: the collective that DDP issues in it; None if it has never issued one.
        depth, code, instruction: of the user's frame that made the call last time; the depth is
            that above the hook, `DEEP` if it is not known.
        moved: this time it was another frame or instruction.
        following: the next call of the step, None for the last.
        broadcasts: a forward in which DDP broadcasts buffers; `buffers`: its
            `require_forward_param_sync` then.
        logged: in a light step, number in the ring of the collective; -1 for none.
        inside_s, before_s, waited_s: seconds in light steps that are not accounted for yet: in the
            call, between it and the one before, and waiting in it; `wall_s`: of an optimizer step,
            since the one before.
    """

    forward: Forward | None
    backward: Backward | None
    optimizer: Optimizer | None
    site: int
    sync: bool
    pending: int
    hook: str
    call: Recurring | None
    depth: int = DEEP
    code: CodeType | None = None
    instruction: int = -1
    moved: bool = True
    following: PlannedCall | None = None
    broadcasts: bool = False
    buffers: bool | None = None
    logged: int = -1
    inside_s: float = 0.0
    before_s: float = 0.0
    waited_s: float = 0.0
    wall_s: float = 0.0

    def find_frame(self, recorder: Recorder) -> FrameType | None:
        """The user's frame that makes this call; None if it is at another line than planned.

        The caller looks first whether the frame at `depth` above its own is still at `instruction`
        of `code`.
        """
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
    """The calls that a step on the fast path makes, and how far it has come.

    Attributes:
        wrapper: weak reference to the DDP object; `sampled` to one of the model's parameters.
        call_log, ring: of the recorder.
        syncs: backwards that synchronise.
        first: the first call; `next`: the one to come.
        averaged: the last backward of this step synchronised.
        sequence_of: asks torch, for a wrapper, how many collectives its group has had.
        sequence: that count before the backward; `before`: (id, version) of the sampled gradient
            then.
        light: how many steps are light, from the one that is running on (see `LightSteps`).
        loads: stands for the loading of a batch, see `LightRun`.
        inside, began: the call of a light step that is running and not accounted for, and when it
            began; `last`, `left`: the one before it, and when that ended.
        lean: light steps may use `LightRun`.
        owed: the first call of light steps that is over and not accounted for; `wraps`: so many
            times since then the last call of a step was passed.
        gaps: before which calls the program's own code took long, for how long without waiting, and
            in which step; `long`: the calls that took long themselves, but for backwards, of which
            it is not known yet what they waited. `elsewhere`: as of the ring, at the end of the
            last call.
    """

    model: Model
    wrapper: weakref.ref[Any]
    sampled: weakref.ref[Any]
    call_log: CallLog
    ring: TimedRing
    syncs: int
    sequence_of: Callable[[Any], int]
    first: PlannedCall
    next: PlannedCall
    averaged: bool = False
    sequence: int = -1
    before: tuple[int, int] = NO_TENSOR
    light: int = 0
    loads: PlannedCall | None = None
    inside: PlannedCall | None = None
    began: float = 0.0
    last: PlannedCall | None = None
    left: float = 0.0
    lean: bool = False
    owed: PlannedCall | None = None
    wraps: int = 0
    elsewhere: float = 0.0
    gaps: list[tuple[PlannedCall, float, int]] = field(default_factory=list)
    long: list[tuple[PlannedCall, float, int]] = field(default_factory=list)

    def load_at(self, recorder: Recorder, site: int) -> None:
        """A batch is loaded at this line."""
        self.loads = PlannedCall(None, None, None, site, False, 0, "a batch", None)
        self.loads.find_frame(recorder)

    def load(self, now: float) -> bool:
        """Mark that a batch is loaded before a light step; False if it is to be entered as on the
        fast path: at another line, or another time of a step."""
        loads, ring = self.loads, self.ring
        if loads is None or not self.lean or ring.in_evaluation:
            return False
        try:
            frame = sys._getframe(loads.depth)
        except ValueError:
            return False
        if frame.f_lasti != loads.instruction or frame.f_code is not loads.code:
            return False
        if self.last is None:
            self.left = ring.since
        self.inside, self.began = loads, now
        ring.mark_phase(_DATA, loads.site, now, ring.step, ring.count, now)
        return True

    def loaded(self, recorder: Recorder, site: int, now: float) -> None:
        """A batch was loaded, before a light step or another one of the fast path. Never raises."""
        try:
            if self.inside is not None:
                self.leave(self.inside, now)
            else:
                self.ring.enter(_USER, site, now)
        except Exception as error:
            self.light, self.inside = 0, None
            recorder.trouble("light-loading", error, "phases of light steps")
            steady_state.give_up()

    def leave(self, call: PlannedCall, now: float) -> None:
        """A call of a light step has ended."""
        ring, began = self.ring, self.began
        if call.logged >= 0:
            ring.done(call.logged, now)
            call.logged = -1
        ring.mark_phase(_USER, call.site, now, ring.step, ring.count, now)
        gap = began - self.left
        elsewhere, self.elsewhere = self.elsewhere, ring.elsewhere
        if gap >= LONG_S and (gap := gap - max(0.0, ring.elsewhere - elsewhere)) >= LONG_S:
            self.gaps.append((call, gap, ring.step))
        if now - began >= LONG_S and call.backward is None:
            self.long.append((call, now - began, ring.step))
        call.inside_s += now - began
        call.before_s += began - self.left
        self.inside, self.last, self.left = None, call, now
        if call is self.loads:
            return
        if self.owed is None:
            self.owed = call
        steady_state.stage = Stage.BETWEEN
        following = call.following
        if following is None:
            steady_state.stage = Stage.NONE
            self.wraps += 1
            following = self.first
        self.next = following

    def examined(self) -> bool:
        """Whether a backward of the step that begins may be one that is examined."""
        return self.model.examined_within(self.syncs)

    def observe_next_step(self) -> None:
        """Have watchers called at the next optimizer step, see `Optimizer.due_at`."""
        one: PlannedCall | None = self.next
        while one is not None and one.optimizer is None:
            one = one.following
        if one is not None and one.optimizer is not None:
            one.optimizer.due_at = 0

    def passed(self) -> list[PlannedCall]:
        """The forwards and backwards of this step so far that no optimizer step has used yet."""
        found: list[PlannedCall] = []
        one = self.first
        while one is not self.next and one.following is not None:
            found = [] if one.optimizer is not None else [*found, one]
            one = one.following
        return found


interrupted: Hook[Plan] = Hook("interrupted")
"""A step has left the fast path: watchers that were not called get its plan, and see `passed`."""


class SteadyState:
    """Decides whether the next step, or the one that is running, takes the fast path.

    Attributes:
        expected: the plan of that step; None for the ordinary path.
        stage: how far the step has come on the fast path.
        broken: a backward was not as planned, or `stop` came during it; its effects are read when
            it is over.
        history: the calls of the step that is running; None for a call that cannot be on the fast
            path.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew, for another run in the same process."""
        self.expected: Plan | None = None
        self.stage = Stage.NONE
        self.history: list[ObservedCall | None] = []
        self._previous: list[ObservedCall | None] = []
        self._repeats = 0
        self._repeats_needed = ALIKE
        self.broken = False

    def observe(self, seen: ObservedCall | None) -> None:
        """Add a forward with gradients, or a backward, of the ordinary path."""
        last = self.history[-1] if self.history else None
        if last is not None and last.kind is Step:  # another step begins
            self._repeats = self._repeats + 1 if self.history == self._previous else 0
            self._previous, self.history = self.history, []
        if len(self.history) <= MOST_CALLS:  # one more than the limit: `_may_repeat` refuses it
            self.history.append(seen)

    def learn(self, recorder: Recorder, optimizer: Optimizer, site: int) -> None:
        """Add an optimizer step of the ordinary path that is over; plan the next step like this one
        if enough steps in a row were equal."""
        if len(self.history) <= MOST_CALLS:
            self.history.append(ObservedCall(Step, optimizer, site, False))
        enough = self._repeats + 1 >= self._repeats_needed and optimizer.steps >= FAST_PATH_AFTER
        if enough and recorder.call_log is not None and self.history == self._previous:
            self._expect(recorder.call_log, self.history)

    def _expect(self, log: CallLog, history: list[ObservedCall | None]) -> None:
        seen = _may_repeat(history)
        wrapper = seen[0].of.wrapper if seen else None
        if wrapper is None or joins(ddp := wrapper()):
            return
        first = _plan_calls(seen, log)
        syncs = sum(one.sync for one in seen if one.kind is Backward)
        model = seen[0].of
        sampled = model.sampled[0]
        group = getattr(ddp, "process_group", None)
        asks = _added_up if group is not None and several_backends(group) else sequence_of_backend
        self.expected = Plan(model, wrapper, sampled, log, log.ring, syncs, asks, first, first)
        self.expected.lean = asks is sequence_of_backend

    def pause(self) -> None:
        """Take the ordinary path in the next step, although it is expected to be like the last."""
        if self.stage == Stage.NONE:
            self.expected = None

    def stop(self, recorder: Recorder) -> None:
        """Leave the fast path, as something unexpected happens."""
        if self.expected is not None:
            self.expected.light = 0
            recorder.catch_up()
        if self.stage == Stage.BACKWARD:
            self.broken = True  # left when the backward is over: its effects are read then
        else:
            self._interrupt(recorder)

    def settle(self, recorder: Recorder) -> None:
        """Leave the fast path if the backward that has ended was `broken`."""
        if self.broken:
            self._interrupt(recorder)

    def _interrupt(self, recorder: Recorder) -> None:
        if self.expected is None:
            return
        if self.stage != Stage.NONE:
            self._repeats_needed = min(2 * self._repeats_needed, MOST_ALIKE)
            interrupted.fire(recorder, self.expected)
        self.expected, self.stage, self.history = None, Stage.NONE, []
        self._repeats, self.broken = 0, False

    def observe_next_step(self) -> None:
        """Have watchers called at the next optimizer step, even on the fast path."""
        if self.expected is not None:
            self.expected.observe_next_step()

    def give_up(self) -> None:
        """Take the ordinary path for the rest of the run."""
        self.expected, self.stage, self._repeats_needed = None, Stage.NONE, sys.maxsize

    def averaged(self, model: Model) -> bool:
        """Whether a step is on the fast path and its last backward averaged a model's gradients."""
        step = self.expected
        return step is not None and step.model is model and step.averaged


def _added_up(wrapper: Any) -> int:
    return sequence_number(getattr(wrapper, "process_group", None))


def _may_repeat(history: list[ObservedCall | None]) -> list[ObservedCall]:
    """The calls, if a step of these can take the fast path; else empty.

    It can if they are of one model, each backward covers all forwards since the one before, and
    synchronises if the last of these asked for it; the last backward synchronises; and all
    optimizer steps come after it.
    """
    seen = [one for one in history if one is not None]
    if len(seen) != len(history) or len(seen) > MOST_CALLS:
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


def _plan_calls(history: list[ObservedCall], log: CallLog) -> PlannedCall:
    """Link the planned calls of a step; returns the first."""
    passes: list[PlannedCall] = []
    pending = 0
    for kind, of, site, sync in history:
        forward = Forward(of, None, site, True, sync, (), {}) if kind is Forward else None
        backward = Backward(0, site, (), 0.0, models=[of]) if kind is Backward else None
        if backward is not None:
            backward.expected_sync[of.number] = sync
        optimizer = of if kind is Step else None
        hook = f"{len(passes)} of a planned step"
        does = "DDP forward" if forward else "DDP backward"
        call = log.recurring(of.group, does, of.number) if optimizer is None else None
        passes.append(PlannedCall(forward, backward, optimizer, site, sync, pending, hook, call))
        pending = pending + 1 if kind is Forward else 0
    for one, following in itertools.pairwise(passes):
        one.following = following
    return passes[0]


steady_state = SteadyState()


class FastPath:
    """The hooks of `around` for calls on the fast path. If one fails, that is recorded, and no
    step takes the fast path any more.

    These functions run in every step, when the training has thrown everything of ours out of the
    processor's caches: what they touch counts, so that some of them repeat a few lines of others.

    Args:
        begins: called with (recorder, args, kwargs); returns a token, or None if this is not the
            call that comes next.
        ends: called with (recorder, token, result).
    """

    __slots__ = ("begins", "ends", "failed", "steady")

    def __init__(
        self, part: str, lost: str, begins: Callable[..., Any], ends: Callable[..., None]
    ) -> None:
        def failed(recorder: Recorder, error: Exception) -> None:
            steady_state.give_up()
            recorder.trouble(part, error, lost)

        self.steady = steady_state
        self.begins, self.ends, self.failed = begins, ends, failed
