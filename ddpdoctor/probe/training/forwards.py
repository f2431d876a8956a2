"""Wraps `DistributedDataParallel.forward`: counts the forwards of wrapped models and fires their
hooks in `lifecycle`."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...events.timing import LONG_S
from ...storage.call_ring import Phase
from ..recording.import_hooks import when_imported
from ..recording.patching import hide_hooks
from ..recording.recorder import Recorder
from ..recording.torch_compat import call_without_modes
from ..recording.watcher import Args, Error, Kwargs, Watcher, on
from . import lifecycle
from .ddp_collectives import DDPCollectives
from .module_origins import ModuleOrigins
from .records import Forward
from .steady_state import FastPath, ObservedCall, Plan, PlannedCall, Stage, steady_state
from .tracked_model import Model
from .wrapped_models import WrappedModels

_FORWARD, _USER = int(Phase.FORWARD), int(Phase.USER)  # plain numbers, see `Stage`


class Forwards(Watcher):
    """Counts of this process.

    Attributes:
        hooked: `forward` is wrapped.
        adopting: there may be wrappers that were created before torch was wrapped.
        inside: forwards running now; `count`: of wrappers so far, with and without gradients.
        registrations: parameters registered in the process, when last asked.
    """

    lost = "forwards of wrapped models"

    def __init__(self) -> None:
        self.hooked = False
        self.adopting = False
        self.inside = 0
        self.count = 0
        self.seconds = 0.0
        self.grad_enabled: Callable[[], bool] = bool
        self.registrations = 0

    def running(self) -> bool:
        """Whether a wrapper's forward is running."""
        return self.inside > 0

    def take_seconds(self) -> float:
        """Seconds spent in forwards since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent

    def install(self) -> None:
        import torch

        self.grad_enabled = torch.is_grad_enabled

    def adopt(self, recorder: Recorder) -> None:
        """Record the models that were wrapped before torch was. One whose constructor is running,
        or that the garbage collector does not track, is recorded at its next forward."""
        self.adopting = True
        # To wrap forward needs torch._dynamo, see `_hook`.
        when_imported("torch._dynamo", lambda _: self._take_up(recorder), lost=self.lost)

    def _take_up(self, recorder: Recorder) -> None:
        self._hook()
        for wrapper in _wrappers():
            if "reducer" in vars(wrapper) and WrappedModels.current.of_wrapper(wrapper) is None:
                WrappedModels.current.adopted(recorder, wrapper)

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        self._hook()

    def _hook(self) -> None:
        # Wrapping forward needs torch._dynamo, which DDP's constructor has imported by now;
        # importing it earlier would cost every script a second.
        if self.hooked:
            return
        self.hooked = True
        hide_hooks()
        from torch.nn.parallel.distributed import DistributedDataParallel

        self.around(
            DistributedDataParallel,
            "forward",
            before=self._begins,
            after=self._ends,
            traced=True,
            fast_path=FastPath(
                "DistributedDataParallel.forward", self.lost, self._begins_fast, self._ends_fast
            ),
        )

    def _begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        wrapper = args[0]
        model = WrappedModels.current.of_wrapper(wrapper)
        if model is None and self.adopting:
            model = WrappedModels.current.adopted(recorder, wrapper)
        if model is None:
            return None
        self.count += 1
        frame, site = recorder.sites.caller("forward")
        grad_enabled = self.grad_enabled()
        sync = bool(wrapper.require_backward_grad_sync)
        number = model.forwards
        usual = grad_enabled and wrapper.training and not model.superseded
        if steady_state.expected is not None and grad_enabled:
            if usual and steady_state.expected.examined():
                steady_state.pause()
            steady_state.stop(recorder)
        forward = Forward(
            model=model,
            wrapper=wrapper,
            site=site,
            grad_enabled=grad_enabled,
            sync=sync,
            args=args[1:],
            kwargs=kwargs,
            frame=frame,
        )
        if model.superseded:
            WrappedModels.current.supersede(model)
        if grad_enabled:
            model.began(forward.site, forward.sync, recorder.step)
            steady_state.observe(ObservedCall(Forward, model, site, sync) if usual else None)
        self.inside += 1
        lifecycle.forward_begins.fire(recorder, forward)
        if not (grad_enabled and wrapper.training):
            lifecycle.trial_begins.fire(recorder, forward)
        if grad_enabled and self._due(number):
            lifecycle.forward_due.fire(recorder, forward)
        forward.frame = None
        return forward, time.monotonic()

    def _due(self, number: int) -> bool:
        """Whether a model's forward of that number is sampled; also if parameters were created
        since the last one, which may be the model's."""
        made = ModuleOrigins.current.registrations
        new, self.registrations = made != self.registrations, made
        return new or lifecycle.looked_at(number)

    def _begins_fast(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """The forward that comes next on the fast path; None if this call is not that."""
        step = steady_state.expected
        if step is None or (forward := (now := step.next).forward) is None:
            return None
        wrapper: Any = args[0]
        model, stage = step.model, steady_state.stage
        if (
            step.wrapper() is not args[0]
            or model.superseded
            or model.rebuilds
            or wrapper.require_backward_grad_sync is not now.sync
            or not (wrapper.training and self.grad_enabled())
            or stage == Stage.FORWARD
        ):
            return None
        # As `Plan.examined` in most steps, without its calls.
        light = step.light
        due = not light and model.synced_backwards + step.syncs > model.next_examined
        if due and stage == Stage.NONE and step.examined():
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
        call, ring = now.call, step.ring
        if (
            light
            and step.lean
            and not now.moved
            and not (lifecycle.forward_begins.in_light or lifecycle.forward_ends.in_light)
            and not ring.in_evaluation
            and now.buffers is wrapper.require_forward_param_sync
            and (not now.broadcasts or (call is not None and call.still_at(frame)))
        ):
            if step.last is None:
                step.left = ring.since
            steady_state.stage = Stage.FORWARD
            self.inside += 1
            step.inside, step.began = now, (began := time.monotonic())
            if now.broadcasts and call is not None:
                log = call.log
                now.logged = ring.write(call.group, log.next, *call.codes, -1, began)
                log.next, log.behind = log.next + 1, log.behind + 1
            ring.mark_phase(_FORWARD, now.site, began, ring.step, ring.count, began)
            return forward, began
        recorder.catch_up()
        if model.pending != now.pending:
            return None
        collectives = DDPCollectives.current
        broadcasts = collectives.buffers and model.group >= 0 and collectives.broadcasts(wrapper)
        if call is None and broadcasts:
            return None
        now.broadcasts, now.buffers = broadcasts, wrapper.require_forward_param_sync
        steady_state.stage = Stage.FORWARD
        number = model.forwards
        model.began(forward.site, forward.sync, recorder.step)
        self.count += 1
        self.inside += 1
        forward.wrapper, forward.args, forward.kwargs = wrapper, args[1:], kwargs
        forward.error = None
        began = time.monotonic()
        if call is not None and broadcasts:
            collectives.forward_recurs(
                model, step.call_log.log_recurring(call, frame, now.moved, began)
            )
        ring.enter(_FORWARD, now.site, began)
        if ModuleOrigins.current.registrations != self.registrations:
            step.light, model.looked_at = 0, 0
        if step.light and not lifecycle.forward_begins.in_light:
            return forward, began
        if number >= model.looked_at or lifecycle.forward_begins.on_fast_path:
            call_without_modes(self._observe_fast, recorder, forward, number, frame)
        return forward, began

    def _observe_fast(
        self, recorder: Recorder, forward: Forward, number: int, frame: FrameType
    ) -> None:
        """Before a forward on the fast path that a watcher waits for: fire its hooks."""
        forward.frame = frame
        lifecycle.forward_begins.fire_fast(recorder, forward)
        forward.model.looked_at = lifecycle.next_looked_at(number)
        if self._due(number):
            lifecycle.forward_due.fire(recorder, forward)
        forward.frame = None

    def _ends_fast(self, recorder: Recorder, token: tuple[Forward, float], result: Any) -> None:
        if steady_state.stage != Stage.FORWARD:  # the fast path was left during the forward
            self._ends(recorder, token, result, None)
            return
        step, (forward, began) = steady_state.expected, token
        assert step is not None
        ended = time.monotonic()
        now = step.inside
        if now is not None and ended - began < LONG_S:
            self.inside -= 1
            step.leave(now, ended)
            return
        recorder.catch_up()
        if (collectives := DDPCollectives.current).forwards:
            collectives.forward_closes(recorder, step.call_log, forward, ended)
        step.ring.enter(_USER, forward.site, ended)
        step.next = step.next.following or step.first
        steady_state.stage = Stage.BETWEEN
        self.inside -= 1
        self.seconds += ended - began
        forward.model.ended(forward.sync, True)
        ends = lifecycle.forward_ends
        if ends.in_light if step.light else ends.on_fast_path:
            forward.output = result
            ends.fire_fast(recorder, forward, step.light)
        forward.wrapper = forward.output = None
        forward.args, forward.kwargs = (), {}

    def passed(self, model: Model, call: PlannedCall, step: int) -> None:
        """Count a forward of a light step, after so many optimizer steps."""
        self.count += 1
        model.began(call.site, call.sync, step)
        model.first_node = -1  # not asked
        model.ended(call.sync, True)

    def goes_on(self, step: Plan, call: PlannedCall, number: int) -> None:
        """As `passed`, for one that is running."""
        forward = call.forward
        assert forward is not None
        self.count += 1
        step.model.began(call.site, call.sync, number)
        step.model.first_node = -1
        forward.wrapper, forward.args, forward.kwargs = step.wrapper(), (), {}
        forward.error = None
        if call.broadcasts:
            DDPCollectives.current.forward_recurs(step.model, call.logged)

    def _ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None:
            return
        forward, began = token
        self.inside -= 1
        self.seconds += time.monotonic() - began
        forward.output, forward.error = result, error
        if steady_state.stage == Stage.FORWARD:
            steady_state.stop(recorder)
        if forward.grad_enabled:
            forward.model.ended(forward.sync, bool(forward.wrapper.require_backward_grad_sync))
        lifecycle.forward_ends.fire(recorder, forward)
        if not (forward.grad_enabled and forward.wrapper.training):
            lifecycle.trial_ends.fire(recorder, forward)
        if error is not None:
            lifecycle.forward_failed.fire(recorder, forward)


def _wrappers() -> list[Any]:
    """Every living DistributedDataParallel, by the garbage collector, as torch keeps no list. Older
    generations first, which is roughly the order of creation: numbers must agree on all ranks."""
    from torch.nn.parallel.distributed import DistributedDataParallel

    return [
        thing
        for generation in (2, 1, 0)
        for thing in gc.get_objects(generation)
        if DistributedDataParallel in type(thing).__mro__  # `issubclass` asks its ABCMeta, slowly
    ]
