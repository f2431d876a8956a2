"""Hooks into optimizers: records them and their steps, and fires the hooks of `lifecycle`.

The hooks are torch's global ones for all optimizers. The pre-hook must run after those that the
program registered on the optimizer, which may still edit gradients; so if there are any, it adds
another hook at their end for the time of the step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...events import OptimizerSeen, StepDone
from ...events.amp import next_told_at, told_at
from ...events.timing import LONG_S
from ...storage.call_ring import Phase
from ..recording import hooks
from ..recording.import_hooks import when_imported
from ..recording.limits import FIRST_STEPS
from ..recording.patching import on_restore
from ..recording.recorder import Recorder, current, run_hook
from ..recording.stopwatch import loading, loading_while_busy
from ..recording.torch_compat import (
    call_without_modes,
    global_pre_hooks,
    interposed,
    own_pre_hooks,
    pre_hooks_after,
)
from ..recording.watcher import Args, Error, Kwargs, Watcher, on
from ..recording.weak_references import WeakIdentityMap
from ..source.parameter_writes import own_step_sites
from . import lifecycle
from .backwards import Backwards
from .forwards import Forwards
from .light_run import LightRun
from .light_steps import LightSteps
from .limits import JOINED_LATER_S, JOINED_S, PULSES_FIRST, STEPS_IN_FULL
from .records import JoinedSteps, Optimizer, Step, has_closure, pieces
from .steady_state import Plan, Stage, steady_state
from .wrapped_models import WrappedModels

PART = "optimizer-step"
STATE_DICTS = "torch.distributed.checkpoint.state_dict"
_LAST = "ddpdoctor"
"""Key of our hook among the optimizer's own, where torch uses numbers."""
_OPTIMIZER, _USER = int(Phase.OPTIMIZER), int(Phase.USER)  # plain numbers, see `Stage`


class Optimizers(Watcher):
    """The optimizers of this process.

    Attributes:
        known: those that have stepped; `count` of them so far.
        sites: where each was created.
        waiting: those with steps that are not recorded yet.
        pulse_at: when the next pulse is due; `pulses` so far.
        light: decides which steps on the fast path are light.
        preparing: torch takes a step without gradients, to have the state that it is about to load.
    """

    lost = "optimizer steps"

    def __init__(self) -> None:
        self._known: WeakIdentityMap[Optimizer] = WeakIdentityMap()
        self.sites: WeakIdentityMap[int] = WeakIdentityMap()
        self.count = 0
        self.last_step_at = 0.0
        self.waiting: list[Optimizer] = []
        self.pulse_at = 0.0
        self.pulses = 0
        self.light = LightSteps()
        self.preparing = 0
        self._pre_hooks: Any = ()
        # Called once, when an optimizer steps in a process that is no rank.
        self._first_step: list[Callable[[], None]] = []

    def at_first_step(self, call: Callable[[], None]) -> None:
        """Call `call` once when an optimizer steps in a process that is no rank, which may make it
        one."""
        self._first_step[:] = [call]

    def known_optimizer(self, optimizer: Any) -> Optimizer | None:
        """What is known of an optimizer; None if it has not stepped."""
        return self._known.get(optimizer)

    def known(self) -> list[Optimizer]:
        """What is known of every living optimizer that has stepped."""
        return list(self._known.values())

    def made(self) -> list[Any]:
        """Every living optimizer, whether it has stepped or not."""
        every = dict.fromkeys([*self.sites, *self._known])
        return [o for o in every if hasattr(o, "param_groups")]

    def made_at(self, optimizer: Any) -> int:
        """The site at which an optimizer was created; -1 if unknown."""
        return self.sites.get(optimizer, -1)

    def parameters(self) -> dict[int, Any]:
        """All parameters of all optimizers, by id."""
        return {id(p): p for o in self.made() for group in o.param_groups for p in group["params"]}

    def install(self) -> None:
        from torch.optim import optimizer

        self.around(
            optimizer.Optimizer, "__init__", before=self._making, lost="where optimizers are made"
        )
        for register, hook in (
            (optimizer.register_optimizer_step_pre_hook, self._pre_hook),
            (optimizer.register_optimizer_step_post_hook, self._post_hook),
        ):
            on_restore(register(hook).remove)
        self._pre_hooks = global_pre_hooks()
        when_imported(STATE_DICTS, self._watch_preparation, lost=self.lost)

    def _watch_preparation(self, module: Any) -> None:
        self.around(module, "_init_optim_state", before=self._prepares, after=self._prepared)

    def _prepares(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        steady_state.stop(recorder)
        self.preparing += 1

    def _prepared(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.preparing -= 1

    def _making(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self.sites[args[0]] = recorder.site()

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's global pre-hook, which runs before those of the optimizer."""
        if (recorder := current.recorder) is None:
            while self._first_step:
                self._first_step.pop()()
            if (recorder := current.recorder) is None:
                return
        plan = steady_state.expected
        if plan is not None and plan.light and interposed.compiler() is None:
            began = time.perf_counter_ns()
            try:
                begun = self._begins_lightly(plan, optimizer, args, kwargs)
            except Exception as error:
                begun = self._fast_path_failed(recorder, error)
            recorder.own_ns += time.perf_counter_ns() - began
            if begun:
                return
        try:
            others = pre_hooks_after(optimizer, self._pre_hook)
        except Exception as error:
            recorder.trouble(PART, error, self.lost)
            return
        if others is not None:
            others.pop(_LAST, None)
            others[_LAST] = self._last_pre_hook
        else:
            self._last_pre_hook(optimizer, args, kwargs)

    def _last_pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The last of the optimizer's own pre-hooks, for the time of one step, if there are others;
        else it is called by the one before all of them."""
        if (recorder := current.recorder) is None:
            return
        if steady_state.expected is not None and interposed.compiler() is None:
            began = time.perf_counter_ns()
            try:
                begun = self._begins_fast(recorder, optimizer, args, kwargs)
            except Exception as error:
                begun = self._fast_path_failed(recorder, error)
            recorder.own_ns += time.perf_counter_ns() - began
            if begun:
                return
        run_hook(recorder, PART, self.lost, self._begins, optimizer, args, kwargs)

    def _fast_path_failed(self, recorder: Recorder, error: Exception) -> bool:
        steady_state.give_up()
        recorder.trouble(PART, error, self.lost)
        return False

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (recorder := current.recorder) is None:
            return
        began = time.perf_counter_ns()
        plan = steady_state.expected
        if plan is not None and plan.inside is not None and steady_state.stage == Stage.STEP:
            try:
                now, ended = plan.inside, began * 1e-9
                if (known := now.optimizer) is None or ended - plan.began >= LONG_S:
                    self._ends_fast(recorder, optimizer)
                else:
                    known.steps += 1
                    recorder.step += 1
                    recorder.moves += 1
                    plan.ring.step = recorder.step
                    now.wall_s += ended - self.last_step_at
                    self.last_step_at = ended
                    plan.leave(now, ended)
                    if plan.next is plan.first:
                        plan.light -= plan.light > 0
                    if not plan.light or ended >= self.pulse_at:
                        self._light_until(recorder, plan, known, ended)
            except Exception as error:
                self._fast_path_failed(recorder, error)
            recorder.own_ns += time.perf_counter_ns() - began
            return
        try:
            if others := own_pre_hooks(optimizer):
                others.pop(_LAST, None)
        except Exception as error:
            recorder.trouble(PART, error, self.lost)
        if steady_state.stage != Stage.STEP:
            run_hook(recorder, PART, self.lost, self._ends, optimizer)
            return
        try:
            self._ends_fast(recorder, optimizer)
        except Exception as error:
            self._fast_path_failed(recorder, error)
        recorder.own_ns += time.perf_counter_ns() - began

    def _begins(self, recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.preparing:
            return
        known = self._known.get(optimizer)
        if known is None:
            with recorder.lock:
                self._emit_steps(recorder)
            known = self._known[optimizer] = Optimizer(self.count, optimizer)
            self.count += 1
            self._emit_seen(recorder, optimizer, known, has_closure(args, kwargs))
            if not self.last_step_at:
                self.last_step_at = recorder.started
        known.began = time.monotonic()
        _, site = recorder.sites.caller("step")
        steady_state.stop(recorder)
        closure, due = has_closure(args, kwargs), told_at(known.steps)
        step = Step(known.reference, known, known.steps, site, known.began, closure, due)
        known.step = step
        # An optimizer that steps inside the backward runs under DDP's lock, one parameter at a
        # time: watchers that ask DDP anything would wait for ever.
        if Backwards.current.running():
            lifecycle.step_inside.fire(recorder, step)
        else:
            lifecycle.step_begins.fire(recorder, step)
            if step.due:
                lifecycle.step_due.fire(recorder, step)

    def _begins_lightly(self, plan: Plan, optimizer: Any, args: Any, kwargs: Any) -> bool:
        """Begin the step of a light step; False if it is to begin as on the fast path."""
        now = plan.next
        known = now.optimizer
        own, every = self._pre_hooks, getattr(optimizer, "_optimizer_step_pre_hooks", True)
        if known is None or known.reference() is not optimizer or kwargs or len(args) > 1:
            return False
        if every or len(own) != 1 or not plan.lean:
            return False
        if lifecycle.step_begins.in_light or lifecycle.step_ends.in_light:
            return False
        try:
            # `_begins_fast`, for which the depth was found, is one call deeper.
            frame: FrameType | None = sys._getframe(now.depth - 1)
        except ValueError:
            return False
        if frame is None or frame.f_lasti != now.instruction or frame.f_code is not now.code:
            return False
        ring = plan.ring
        if plan.last is None:
            plan.left = ring.since
        steady_state.stage = Stage.STEP
        plan.inside, plan.began = now, (began := time.monotonic())
        ring.mark_phase(_OPTIMIZER, now.site, began, ring.step, ring.count, began)
        return True

    def _light_until(self, recorder: Recorder, plan: Plan, known: Optimizer, now: float) -> None:
        """The light steps are over, or a pulse is due."""
        recorder.catch_up()
        if not plan.light and plan.next is plan.first:
            self._lighten(recorder, plan, known, now)
        if now >= self.pulse_at and known.step is not None:
            self._fire_pulse(recorder, known.step, now)

    def _lighten(self, recorder: Recorder, plan: Plan, known: Optimizer, now: float) -> None:
        """After a step: decide whether light ones follow."""
        steps = self.light.after(recorder, plan, known.steps - 1, now)
        backwards = Backwards.current
        if steps and (not backwards.waits or backwards.last_gradient.follow(plan.model)):
            plan.light = steps
            recorder.behind = LightRun(recorder, plan, self._record_passed).catch_up

    def _record_passed(self, known: Optimizer, count: int, wall_s: float, own_s: float) -> None:
        """Record steps that were light."""
        recorder = current.recorder
        if recorder is not None and known.step is not None:
            known.step.number = known.steps - 1
            with recorder.lock:
                self._record_steps(recorder, known, count, wall_s, own_s)

    def _begins_fast(self, recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> bool:
        """Begin the step that comes next on the fast path; False if this call is not that."""
        expected = steady_state.expected
        if expected is None or (known := (now := expected.next).optimizer) is None:
            return False
        step = known.step
        if step is None or known.reference() is not optimizer:
            return False
        if (kwargs or len(args) > 1) and has_closure(args, kwargs):
            return False
        now.moved = False
        try:
            frame: FrameType | None = sys._getframe(now.depth)
        except ValueError:
            frame = None
        if frame is None or frame.f_lasti != now.instruction or frame.f_code is not now.code:
            frame = now.find_frame(recorder)
            if frame is None:
                return False
        recorder.catch_up()
        number = step.number = known.steps
        steady_state.stage = Stage.STEP
        if expected.light and not lifecycle.step_begins.needed:
            step.due = False
        else:
            if number >= known.due_at:
                call_without_modes(_due_fast, recorder, known, step)
            else:
                step.due = False
            if lifecycle.step_begins.on_fast_path:
                call_without_modes(lifecycle.step_begins.fire_fast, recorder, step)
        step.began = known.began = began = time.monotonic()
        expected.ring.enter(_OPTIMIZER, now.site, began)
        return True

    def _count_step(self, recorder: Recorder, known: Optimizer) -> float:
        """Count a step that is over, and record it: at once, or together with steps that follow
        soon at the same line. Returns the time."""
        now = time.monotonic()
        known.steps += 1
        recorder.step += 1
        recorder.moves += 1
        wall_s, self.last_step_at = now - self.last_step_at, now
        with recorder.lock:
            self._record_steps(recorder, known, 1, wall_s, now - known.began)
        return now

    def _record_steps(
        self, recorder: Recorder, known: Optimizer, count: int, wall_s: float, own_s: float
    ) -> None:
        """Record steps that are over, the last of them just now."""
        assert known.step is not None
        site, joined, now = known.step.site, known.joined, self.last_step_at
        step = known.steps - 1
        if joined is not None and joined.site != site:
            self._emit_steps(recorder)
            joined = None
        if joined is None:
            joined = known.joined = JoinedSteps(site)
            self.waiting.append(known)
        joined.count += count
        joined.step, joined.at = step, now
        backwards = Backwards.current
        joined.backwards, joined.synced = backwards.count, backwards.synced
        joined.wall_s += wall_s
        if self.count > 1:
            _take_seconds(joined)
        joined.optimizer_s += own_s
        within = JOINED_S if step < STEPS_IN_FULL else JOINED_LATER_S
        if step < FIRST_STEPS or now - known.emitted_at >= within:
            self._emit_steps(recorder)
        else:
            recorder.before_events = self._emit_steps

    def _emit_steps(self, recorder: Recorder) -> None:
        """Write the steps that wait; called before any other event is written, to keep the
        order."""
        recorder.before_events = None
        waiting, self.waiting = self.waiting, []
        for known in waiting:
            joined, known.joined = known.joined, None
            if joined is None:
                continue
            _take_seconds(joined)
            recorder.emit(
                StepDone(
                    at=joined.at,
                    optimizer=known.number,
                    step=joined.step,
                    count=joined.count,
                    site=joined.site,
                    wall_s=joined.wall_s,
                    data_s=joined.data_s,
                    overlapped_s=joined.overlapped_s,
                    forward_s=joined.forward_s,
                    backward_s=joined.backward_s,
                    optimizer_s=joined.optimizer_s,
                    backwards=joined.backwards - known.backwards,
                    synced=joined.synced - known.synced,
                )
            )
            known.emitted_at = joined.at
            known.backwards, known.synced = joined.backwards, joined.synced

    @on(hooks.leaving, lost="the last steps")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._emit_steps(recorder)

    def _emit_seen(
        self, recorder: Recorder, optimizer: Any, known: Optimizer, closure: bool
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = []
        owned: set[int] = set()
        for model in WrappedModels.current.live():
            mine = {id(p) for p in model.held().values()}
            if mine & held:
                owners.append(model.number)
                owned |= mine
        step, writes = own_step_sites(recorder, type(optimizer))
        recorder.emit(
            OptimizerSeen(
                at=time.monotonic(),
                optimizer=known.number,
                kind=type(optimizer).__name__,
                site=self.sites.get(optimizer, -1),
                models=tuple(owners),
                parameters=len(held),
                foreign=len(held - owned),
                closure=closure,
                pieces=pieces(optimizer),
                step_site=step,
                writes=writes,
            )
        )

    def _ends(self, recorder: Recorder, optimizer: Any) -> None:
        known = self._known.get(optimizer)
        if known is None or known.step is None or self.preparing:
            return
        now = self._count_step(recorder, known)
        if not Backwards.current.running():
            if known.step.closure:
                lifecycle.closure_ends.fire(recorder, known.step)
            lifecycle.step_ends.fire(recorder, known.step)
            steady_state.learn(recorder, known, known.step.site)
            if now >= self.pulse_at or recorder.step <= PULSES_FIRST:
                self._fire_pulse(recorder, known.step, now)
        if known.steps == FIRST_STEPS + 1:  # the first steps, all sampled, have a cost of their own
            recorder.emit_cost(anyway=True)

    def _ends_fast(self, recorder: Recorder, optimizer: Any) -> None:
        expected = steady_state.expected
        known = expected.next.optimizer if expected is not None else None
        if expected is None or known is None or known.step is None:
            self._ends(recorder, optimizer)
            return
        recorder.catch_up()
        now = self._count_step(recorder, known)
        expected.call_log.step_ended(recorder.step, now)
        expected.ring.enter(_USER, known.step.site, now)
        if expected.next.following is not None:
            expected.next, steady_state.stage = expected.next.following, Stage.BETWEEN
        else:
            expected.next, expected.averaged, steady_state.stage = expected.first, False, Stage.NONE
        if lifecycle.step_ends.needed:
            expected.light = 0
        ends = lifecycle.step_ends
        if ends.in_light if expected.light else ends.on_fast_path:
            ends.fire_fast(recorder, known.step, expected.light)
        if expected.next is expected.first:
            expected.light -= expected.light > 0
            if not expected.light:
                self._lighten(recorder, expected, known, now)
        if now >= self.pulse_at:
            self._fire_pulse(recorder, known.step, now)

    def _fire_pulse(self, recorder: Recorder, step: Step, now: float) -> None:
        """Fire a pulse, and choose the time of the next."""
        self.pulses += 1
        self.pulse_at = now + lifecycle.until_pulse(self.pulses)
        lifecycle.pulse.fire(recorder, step)
        recorder.emit_cost()


def _due_fast(recorder: Recorder, known: Optimizer, step: Step) -> None:
    """Before a step on the fast path that a watcher waits for: fire the hooks for it."""
    step.due = told_at(step.number)
    known.due_at = next_told_at(step.number)
    lifecycle.fast_step_due.fire(recorder, step)
    if step.due:
        lifecycle.step_due.fire(recorder, step)


def _take_seconds(joined: JoinedSteps) -> None:
    """Add the seconds spent in each phase since the last call."""
    joined.data_s += loading.take_seconds()
    joined.overlapped_s += loading_while_busy.take_seconds()
    joined.forward_s += Forwards.current.take_seconds()
    joined.backward_s += Backwards.current.take_seconds()
