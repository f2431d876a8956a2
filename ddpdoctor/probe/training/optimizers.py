"""Hooks into optimizers: records them and their steps, and fires the hooks of `lifecycle`.

The hooks are torch's global ones for all optimizers. The pre-hook must run after those that the
program registered on the optimizer, which may still edit gradients; so if there are any, it adds
another hook at their end for the time of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...events import OptimizerSeen, StepDone
from ...events.amp import next_told_at, told_at
from ...storage.call_ring import Phase
from ..recording import hooks
from ..recording.patching import around, on_restore
from ..recording.recorder import Recorder, current, run_hook
from ..recording.sampling import FIRST_STEPS
from ..recording.stopwatch import loading
from ..recording.torch_compat import call_without_modes, own_pre_hooks, pre_hooks_after
from ..recording.weak_references import WeakIdentityMap
from . import backwards, forwards, lifecycle, wrapped_models
from .records import JoinedSteps, Optimizer, Step
from .steady_state import FastPath, Stage, steady_state

PART, LOST = "optimizer-step", "optimizer steps"
_LAST = "ddpdoctor"
"""Key of our hook among the optimizer's own, where torch uses numbers."""
_OPTIMIZER, _USER = int(Phase.OPTIMIZER), int(Phase.USER)  # plain numbers, see `Stage`

STEPS_IN_FULL = 2000
JOINED_S, JOINED_LATER_S = 0.25, 1.0
"""After the first steps of an optimizer (`sampling.FIRST_STEPS`), the steps of `JOINED_S` seconds
share one record, and after `STEPS_IN_FULL` those of a second: fast loops would fill the record. The
ring has the number of the last step in any case."""


class _Optimizers:
    """The optimizers of this process.

    Attributes:
        known: those that have stepped; `count` of them so far.
        sites: where each was created.
        waiting: those with steps that are not recorded yet.
        pulse_at: when the next pulse is due; `pulses` so far.
    """

    def __init__(self) -> None:
        self.known: WeakIdentityMap[Optimizer] = WeakIdentityMap()
        self.sites: WeakIdentityMap[int] = WeakIdentityMap()
        self.count = 0
        self.last_step_at = 0.0
        self.waiting: list[Optimizer] = []
        self.pulse_at = 0.0
        self.pulses = 0


_optimizers = _Optimizers()
_first_step: list[Callable[[], None]] = []
"""Called once, when an optimizer steps in a process that is no rank."""


def at_first_step(call: Callable[[], None]) -> None:
    """Call `call` once when an optimizer steps in a process that is no rank, which may make it
    one."""
    _first_step[:] = [call]


def known_optimizer(optimizer: Any) -> Optimizer | None:
    """What is known of an optimizer; None if it has not stepped."""
    return _optimizers.known.get(optimizer)


def known() -> list[Optimizer]:
    """What is known of every living optimizer that has stepped."""
    return list(_optimizers.known.values())


def made() -> list[Any]:
    """Every living optimizer, whether it has stepped or not."""
    every = dict.fromkeys([*_optimizers.sites, *_optimizers.known])
    return [o for o in every if hasattr(o, "param_groups")]


def made_at(optimizer: Any) -> int:
    """The site at which an optimizer was created; -1 if unknown."""
    return _optimizers.sites.get(optimizer, -1)


def parameters() -> dict[int, Any]:
    """All parameters of all optimizers, by id."""
    return {id(p): p for o in made() for group in o.param_groups for p in group["params"]}


def install() -> None:
    from torch.optim import optimizer

    _optimizers.__init__()  # type: ignore[misc]
    around(optimizer.Optimizer, "__init__", before=_making, lost="where optimizers are made")
    for register, hook in (
        (optimizer.register_optimizer_step_pre_hook, _pre_hook),
        (optimizer.register_optimizer_step_post_hook, _post_hook),
    ):
        on_restore(register(hook).remove)
    hooks.leaving.subscribe(_leaving, lost="the last steps")


def _making(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _optimizers.sites[args[0]] = recorder.site()


def _pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    """torch's global pre-hook, which runs before those of the optimizer."""
    if (recorder := current.recorder) is None:
        while _first_step:
            _first_step.pop()()
        if (recorder := current.recorder) is None:
            return
    try:
        others = pre_hooks_after(optimizer, _pre_hook)
    except Exception as error:
        recorder.trouble(PART, error, LOST)
        return
    if others is not None:
        others.pop(_LAST, None)
        others[_LAST] = _last_pre_hook
    elif _fast_path.begins(recorder, (optimizer, args), kwargs) is None:
        run_hook(recorder, PART, LOST, _begins, optimizer, args, kwargs)


def _last_pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The last of the optimizer's own pre-hooks, for the time of one step, if there are others."""
    if (recorder := current.recorder) is None:
        return
    if _fast_path.begins(recorder, (optimizer, args), kwargs) is None:
        run_hook(recorder, PART, LOST, _begins, optimizer, args, kwargs)


def _post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    if (recorder := current.recorder) is None:
        return
    try:
        if others := own_pre_hooks(optimizer):
            others.pop(_LAST, None)
    except Exception as error:
        recorder.trouble(PART, error, LOST)
    if steady_state.stage == Stage.STEP:
        _fast_path.ends(recorder, optimizer, None)
    else:
        run_hook(recorder, PART, LOST, _ends, optimizer)


def _has_closure(args: Any, kwargs: Any) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _begins(recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> None:
    known = _optimizers.known.get(optimizer)
    if known is None:
        with recorder.lock:
            _emit_steps(recorder)
        known = _optimizers.known[optimizer] = Optimizer(_optimizers.count, optimizer)
        _optimizers.count += 1
        _emit_seen(recorder, optimizer, known, _has_closure(args, kwargs))
        if not _optimizers.last_step_at:
            _optimizers.last_step_at = recorder.started
    known.began = time.monotonic()
    _, site = recorder.sites.caller("step")
    steady_state.stop(recorder)
    closure, due = _has_closure(args, kwargs), told_at(known.steps)
    step = Step(known.reference, known, known.steps, site, known.began, closure, due)
    known.step = step
    # An optimizer that steps inside the backward runs under DDP's lock, one parameter at a time:
    # watchers that ask DDP anything would wait for ever.
    if backwards.running():
        lifecycle.step_inside.fire(recorder, step)
    else:
        lifecycle.step_begins.fire(recorder, step)
        if step.due:
            lifecycle.step_due.fire(recorder, step)


def _begins_fast(recorder: Recorder, args: Any, kwargs: Any) -> Any:
    """The optimizer step that comes next on the fast path; None if this call is not that."""
    expected = steady_state.expected
    if expected is None or (known := (now := expected.next).optimizer) is None:
        return None
    step = known.step
    if step is None or known.reference() is not args[0] or _has_closure(args[1], kwargs):
        return None
    if now.frame(recorder) is None:
        return None
    number = step.number = known.steps
    steady_state.stage = Stage.STEP
    if number >= known.due_at:
        call_without_modes(_due_fast, recorder, known, step)
    else:
        step.due = False
    if lifecycle.step_begins.on_fast_path:
        call_without_modes(lifecycle.step_begins.fire_fast, recorder, step)
    step.began = known.began = began = time.monotonic()
    expected.ring.enter(_OPTIMIZER, now.site, began)
    return step


def _due_fast(recorder: Recorder, known: Optimizer, step: Step) -> None:
    """Before a step on the fast path that a watcher waits for: fire the hooks for it."""
    step.due = told_at(step.number)
    known.due_at = next_told_at(step.number)
    lifecycle.fast_step_due.fire(recorder, step)
    if step.due:
        lifecycle.step_due.fire(recorder, step)


def _record_step(recorder: Recorder, known: Optimizer, step: int, now: float) -> None:
    """Record a step: at once, or together with steps that follow soon at the same line."""
    assert known.step is not None
    site, joined = known.step.site, known.joined
    if joined is not None and joined.site != site:
        _emit_steps(recorder)
        joined = None
    if joined is None:
        joined = known.joined = JoinedSteps(site)
        _optimizers.waiting.append(known)
    joined.count += 1
    joined.step, joined.at = step, now
    joined.backwards, joined.synced = backwards.counts()
    joined.wall_s += now - _optimizers.last_step_at
    if _optimizers.count > 1:
        _take_seconds(joined)
    joined.optimizer_s += now - known.began
    _optimizers.last_step_at = now
    within = JOINED_S if step < STEPS_IN_FULL else JOINED_LATER_S
    if step < FIRST_STEPS or now - known.emitted_at >= within:
        _emit_steps(recorder)
    else:
        recorder.before_events = _emit_steps


def _take_seconds(joined: JoinedSteps) -> None:
    """Add the seconds spent in each phase since the last call."""
    joined.data_s += loading.take_seconds()
    joined.forward_s += forwards.take_seconds()
    joined.backward_s += backwards.take_seconds()


def _emit_steps(recorder: Recorder) -> None:
    """Write the steps that wait; called before any other event is written, to keep the order."""
    recorder.before_events = None
    waiting, _optimizers.waiting = _optimizers.waiting, []
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
                forward_s=joined.forward_s,
                backward_s=joined.backward_s,
                optimizer_s=joined.optimizer_s,
                backwards=joined.backwards - known.backwards,
                synced=joined.synced - known.synced,
            )
        )
        known.emitted_at = joined.at
        known.backwards, known.synced = joined.backwards, joined.synced


def _leaving(recorder: Recorder, _: None) -> None:
    _emit_steps(recorder)


def _emit_seen(recorder: Recorder, optimizer: Any, known: Optimizer, closure: bool) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    owners = []
    owned: set[int] = set()
    for model in wrapped_models.live():
        mine = {id(p) for ref in model.parameters if (p := ref()) is not None}
        if mine & held:
            owners.append(model.number)
            owned |= mine
    recorder.emit(
        OptimizerSeen(
            at=time.monotonic(),
            optimizer=known.number,
            kind=type(optimizer).__name__,
            site=_optimizers.sites.get(optimizer, -1),
            models=tuple(owners),
            parameters=len(held),
            foreign=len(held - owned),
            closure=closure,
            pieces=_pieces(optimizer),
        )
    )


def _pieces(optimizer: Any) -> tuple[int, ...]:
    """The ranks over which an optimizer's parameters are sharded; empty if they are not DTensors of
    one mesh."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {getattr(p, "device_mesh", None) for p in parameters}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _ends(recorder: Recorder, optimizer: Any) -> None:
    known = _optimizers.known.get(optimizer)
    if known is None or known.step is None:
        return
    now = _count_step(recorder, known)
    if not backwards.running():
        if known.step.closure:
            lifecycle.closure_ends.fire(recorder, known.step)
        lifecycle.step_ends.fire(recorder, known.step)
        steady_state.learn(recorder, known, known.step.site)
        if now >= _optimizers.pulse_at or recorder.step <= lifecycle.PULSES_FIRST:
            _fire_pulse(recorder, known.step, now)
    if known.steps == FIRST_STEPS + 1:  # the first steps, all sampled, have a cost of their own
        recorder.emit_cost(anyway=True)


def _ends_fast(recorder: Recorder, optimizer: Any, _: None) -> None:
    expected = steady_state.expected
    known = expected.next.optimizer if expected is not None else None
    if expected is None or known is None or known.step is None:
        _ends(recorder, optimizer)
        return
    now = _count_step(recorder, known)
    expected.call_log.step_ended(recorder.step, now)
    expected.ring.enter(_USER, known.step.site, now)
    if expected.next.following is not None:
        expected.next, steady_state.stage = expected.next.following, Stage.BETWEEN
    else:
        expected.next, expected.averaged, steady_state.stage = expected.first, False, Stage.NONE
    if lifecycle.step_ends.on_fast_path:
        lifecycle.step_ends.fire_fast(recorder, known.step)
    if now >= _optimizers.pulse_at:
        _fire_pulse(recorder, known.step, now)


def _count_step(recorder: Recorder, known: Optimizer) -> float:
    """Count and record a step that is over; returns the time."""
    now = time.monotonic()
    step, known.steps = known.steps, known.steps + 1
    recorder.step += 1
    recorder.moves += 1
    with recorder.lock:
        _record_step(recorder, known, step, now)
    return now


def _fire_pulse(recorder: Recorder, step: Step, now: float) -> None:
    """Fire a pulse, and choose the time of the next."""
    _optimizers.pulses += 1
    _optimizers.pulse_at = now + lifecycle.until_pulse(_optimizers.pulses)
    lifecycle.pulse.fire(recorder, step)
    recorder.emit_cost()


_fast_path = FastPath(PART, LOST, _begins_fast, _ends_fast)
