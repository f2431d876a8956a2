"""Wraps `torch.autograd.backward`: which models a backward belongs to, whether it synchronised, and
which parameters got no gradient. Fires the hooks of `lifecycle`."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

from ...storage.call_ring import Phase
from ..recording.patching import on_restore
from ..recording.recorder import Recorder, current_recorder
from ..recording.torch_compat import call_without_modes, interposed
from ..recording.watcher import Args, Error, Kwargs, Watcher
from ..tensors.tensor_watch import grad_of, mark
from . import lifecycle
from .accumulate_grad import LastGradient
from .backward_observation import BackwardObservation
from .ddp_collectives import DDPCollectives
from .records import Backward
from .steady_state import (
    FastPath,
    ObservedCall,
    Plan,
    PlannedCall,
    Stage,
    steady_state,
)
from .tracked_model import Model
from .wrapped_models import WrappedModels

_BACKWARD, _USER = int(Phase.BACKWARD), int(Phase.USER)  # plain numbers, see `Stage`


class Backwards(Watcher):
    """Counts of this process.

    Attributes:
        depth: backwards running now, one inside the other; `nested`: inside the outermost so far.
        count: outermost backwards that have ended; `synced` of them communicated.
        seconds: spent in them since it was last read.
        step: optimizer steps before the end of the last one.
        plain: `torch.Tensor`.
        last_gradient: when the last gradient was computed, in light steps.
        waits: somebody wants to know how long backwards wait.
    """

    lost = "backwards, and with them unused parameters and unsynchronised steps"

    def __init__(self) -> None:
        self.depth = 0
        self.nested = 0
        self.count = 0
        self.synced = 0
        self.seconds = 0.0
        self.step = -1
        self.plain: Any = None
        self.last_gradient = LastGradient()
        self.waits = False

    def running(self) -> bool:
        """Whether a backward is running."""
        return self.depth > 0

    def since(self, step: int) -> bool:
        """Whether a backward has ended since that many optimizer steps were taken."""
        return self.step >= step

    def counts(self) -> tuple[int, int]:
        """(`count`, `synced`)"""
        return self.count, self.synced

    def take_seconds(self) -> float:
        """Seconds spent in backwards since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent

    def install(self) -> None:
        import torch.autograd

        self.plain = torch.Tensor
        usual = FastPath("autograd.backward", self.lost, self._begins_fast, self._ends_fast)
        self.around(
            torch.autograd, "backward", before=self._begins, after=self._ends, fast_path=usual
        )
        on_restore(self.last_gradient.stop)

    def _begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.depth += 1
        if self.depth > 1:  # re-entrant checkpointing runs backward inside backward
            self.nested += 1
            return None
        self.nested = 0
        recorder.moves += 1
        frame, site = recorder.sites.caller("backward")
        steady_state.stop(recorder)
        backward = Backward(self.count, site, _roots(args, kwargs), time.monotonic(), frame)
        for model in (*WrappedModels.current.live(), *WrappedModels.current.discarded()):
            observation = BackwardObservation(model)
            backward.observations.append(observation)
            awaited = model.pending_sync or model.unfinished
            if observation.firing is not None and awaited and not model.find_unused:
                observation.firing.on_complete = partial(_complete, recorder, backward, model)
        lifecycle.backward_begins.fire(recorder, backward)
        backward.frame = None
        return backward

    def _begins_fast(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """The backward that comes next on the fast path; None if this call is not that."""
        step = steady_state.expected
        if step is None or (backward := (now := step.next).backward) is None:
            return None
        wrapper = step.wrapper()
        if wrapper is None or self.depth:
            return None
        flag = wrapper.require_backward_grad_sync
        if now.sync and not flag:
            return None
        call = now.call
        if call is None and now.sync and step.model.group >= 0:
            return None
        now.moved = False
        try:
            frame: FrameType | None = sys._getframe(now.depth)
        except ValueError:
            frame = None
        if frame is None or frame.f_lasti != now.instruction or frame.f_code is not now.code:
            frame = now.find_frame(recorder)
            if frame is None:
                return None
        if step.light:
            # It starts from one number that is finite, or that cannot be read without waiting for
            # a device, and no mode of the user's would see the reading.
            root: Any = args[0] if args else None
            if (
                type(root) is not self.plain
                or interposed.functions()
                or interposed.dispatches()
                or (root.is_cpu and not (root.numel() == 1 and math.isfinite(root.item())))
                or lifecycle.backward_begins.needed
            ):
                step.light = 0
        ring = step.ring
        if (
            step.light
            and step.lean
            and not now.moved
            and not (lifecycle.backward_begins.in_light or lifecycle.backward_ends.in_light)
            and (not now.sync or (call is not None and call.still_at(frame)))
        ):
            if step.last is None:
                step.left = ring.since
            self.depth, self.nested = 1, 0
            recorder.moves += 1
            steady_state.stage = Stage.BACKWARD
            step.sequence = wrapper.process_group._get_sequence_number_for_group()
            step.before = mark(grad_of(step.sampled()))
            step.inside, step.began = now, (began := time.monotonic())
            if now.sync and call is not None:
                log = call.log
                now.logged = ring.write(call.group, log.next, *call.codes, -1, began)
                log.next, log.behind = log.next + 1, log.behind + 1
            ring.mark_phase(_BACKWARD, now.site, began, ring.step, ring.count, began)
            return backward
        recorder.catch_up()
        if step.model.pending != now.pending or step.model.running:
            return None
        self.depth += 1
        self.nested = 0
        recorder.moves += 1
        backward.error, backward.flag = None, flag
        backward.synced.clear()
        steady_state.stage = Stage.BACKWARD
        backward.began = began = time.monotonic()
        if call is not None and now.sync:
            backward.logged = step.call_log.log_recurring(call, frame, now.moved, began)
        ring.enter(_BACKWARD, now.site, began)
        backward.roots = _roots(args, kwargs)
        if step.light:
            step.before = mark(grad_of(step.sampled()))
            step.sequence = step.sequence_of(wrapper)
            if lifecycle.backward_begins.in_light:
                lifecycle.backward_begins.fire_fast(recorder, backward, step.light)
            return backward
        backward.number, backward.frame = self.count, frame
        if interposed.functions() or interposed.dispatches():
            call_without_modes(_observe_fast, recorder, step, backward)
        else:
            lifecycle.backward_begins.fire_fast(recorder, backward)
            step.before = mark(grad_of(step.sampled()))
        backward.frame = None
        step.sequence = step.sequence_of(wrapper)
        return backward

    def _ends_fast(self, recorder: Recorder, backward: Backward, result: None) -> None:
        """After a backward on the fast path: it was the model's if its group communicated or a
        gradient changed. Otherwise it was of something else, and the model's own is still to
        come."""
        step = steady_state.expected
        if step is None:
            self._ends(recorder, backward, result, None)
            return
        now, ended = step.next, time.monotonic()
        model = step.model
        self.depth -= 1
        if step.inside is now and (wrapper := step.wrapper()) is not None:
            sequence = wrapper.process_group._get_sequence_number_for_group()
            own = now.sync or mark(grad_of(step.sampled())) != step.before
            if (sequence != step.sequence) is now.sync and own:
                last = self.last_gradient.at
                if last > step.began:
                    now.waited_s += ended - last
                step.leave(now, ended)
                return
        recorder.catch_up()
        steady_state.stage = Stage.BETWEEN
        self.seconds += ended - backward.began
        self.count += 1
        self.step = recorder.step
        backward.nested = self.nested
        averaged = step.sequence_of(step.wrapper()) != step.sequence
        if averaged:
            self.synced += 1
            backward.synced.add(model.number)
        if averaged or mark(grad_of(step.sampled())) != step.before:
            step.next, step.averaged = now.following or step.first, averaged
            model.reached(recorder.step, averaged)
            model.answered()
        else:
            backward.models = []
        if backward.logged >= 0:
            if averaged:
                step.ring.done(backward.logged, ended)
            else:
                step.call_log.void(backward.logged)
            backward.logged = -1
        step.ring.enter(_USER, backward.site, ended)
        if step.light and self.last_gradient.at > backward.began:
            step.ring.waited_before(ended - self.last_gradient.at)
        ends = lifecycle.backward_ends
        if ends.in_light if step.light else ends.on_fast_path:
            ends.fire_fast(recorder, backward, step.light)
        backward.roots = ()
        if averaged is not now.sync or not backward.models:
            steady_state.broken = True
        if steady_state.broken:
            steady_state.settle(recorder)

    def passed(self, model: Model, call: PlannedCall, step: int) -> None:
        """Count a backward of a light step, after so many optimizer steps."""
        self.count += 1
        self.step = step
        assert call.backward is not None
        call.backward.synced.clear()
        if call.sync:
            self.synced += 1
            call.backward.synced.add(model.number)
        model.reached(step, call.sync)
        model.answered()

    def goes_on(self, step: Plan, call: PlannedCall) -> None:
        """As `passed`, for one that is running."""
        backward, wrapper = call.backward, step.wrapper()
        assert backward is not None
        backward.error, backward.began, backward.logged = None, step.began, call.logged
        backward.flag = None if wrapper is None else bool(wrapper.require_backward_grad_sync)
        backward.synced.clear()

    def _ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.depth -= 1
        if token is None:
            return
        backward: Backward = token
        self.seconds += time.monotonic() - backward.began
        step = steady_state.expected
        if step is not None and backward is step.next.backward:
            # It began on the fast path and raised: what has passed of the step ends before it.
            steady_state.stage = Stage.BETWEEN
            steady_state.stop(recorder)
        if backward.logged >= 0:
            DDPCollectives.current.backward_recurs(backward.logged)
            backward.logged = -1
        backward.error, backward.nested = error, self.nested
        waiting = 0
        for observation in backward.observations:
            waiting += observation.expected
            if observation.firing is not None:
                observation.firing.stop()
                if counts := observation.firing.counts:
                    observation.model.last_position = next(reversed(counts))
                backward.fired[observation.model.number] = observation.firing.counts
            if error is None:
                observation.after_backward()
        if error is None:
            self.count += 1
            _credit(backward.observations)
            for observation in backward.observations:
                _attribute(backward, observation, recorder.step, alone=waiting == 1)
            self.synced += bool(backward.synced)
            self.step = recorder.step
        steady_state.observe(_observed(backward))
        lifecycle.backward_ends.fire(recorder, backward)
        if backward.untouched:
            lifecycle.backward_examined.fire(recorder, backward)
        if backward.unannounced:
            lifecycle.backward_unannounced.fire(recorder, backward)
        if error is not None:
            lifecycle.backward_failed.fire(recorder, backward)


def _roots(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    tensors = args[0] if args else kwargs.get("tensors", ())
    return tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)


def _observe_fast(recorder: Recorder, step: Plan, backward: Backward) -> None:
    """Before a backward on the fast path: fire its hook, and read the version of a gradient."""
    lifecycle.backward_begins.fire_fast(recorder, backward)
    step.before = mark(grad_of(step.sampled()))


def _complete(recorder: Recorder, backward: Backward, model: Model) -> None:
    if current_recorder() is recorder:
        lifecycle.gradients_ready.fire(recorder, (backward, model))


def _observed(backward: Backward) -> ObservedCall | None:
    """A backward as `SteadyState` compares it; None for one that must not be on the fast path."""
    alone = len(backward.observations) == len(backward.models) == 1
    if not alone or backward.error is not None or backward.observations[0].sequence < 0:
        return None
    if backward.models[0].running:
        return None
    return ObservedCall(Backward, backward.models[0], backward.site, bool(backward.synced))


def _credit(observations: list[BackwardObservation]) -> None:
    """Decide which models communicated, as models that share a group share its count of
    collectives, with each other and with the program.

    A model whose forwards were all under `no_sync` did not. Of several of one group, those that DDP
    was not to synchronise did not if there is one that it was, and that this backward reached.
    """
    for observation in observations:
        observation.communicated &= observation.model.armed or not observation.expected
    moved = [observation for observation in observations if observation.communicated]
    if len(moved) < 2:
        return
    due = {
        id(observation.group)
        for observation in moved
        if observation.model.armed and observation.touched
    }
    for observation in moved:
        if not observation.model.armed and id(observation.group) in due:
            observation.communicated = False


def _attribute(
    backward: Backward, observation: BackwardObservation, step: int, *, alone: bool
) -> None:
    """Decide whether a backward was (also) a model's, and which parameters it left out.

    Args:
        alone: this is the only model whose forward waits for a backward.
    """
    model = observation.model
    communicated, touched = observation.communicated, observation.touched
    if communicated and (observation.expected or touched):
        backward.synced.add(model.number)
    if not touched and not (alone and observation.expected and communicated):
        return  # this backward was of another model: its own is still to come
    untouched = observation.untouched()
    model.reached(step, communicated)
    if observation.expected:
        backward.models.append(model)
        backward.expected_sync[model.number] = model.pending_sync
        if model.pending_sync:
            model.waits_for(untouched, communicated)
        model.answered()
    elif model.unfinished:
        backward.continued.append(model)
        model.waits_for(untouched, communicated)
    else:
        backward.unannounced.append((model, communicated))
        return
    if untouched is not None:
        backward.untouched[model.number] = untouched
