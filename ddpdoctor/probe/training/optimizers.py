"""Optimizers and their steps."""

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
_OPTIMIZER, _USER = int(Phase.OPTIMIZER), int(Phase.USER)  # see `Stage`

STEPS_IN_FULL = 2000
JOINED_S, JOINED_LATER_S = 0.25, 1.0
"""After the first steps of an optimizer those within so many seconds are told in one record, and
after `STEPS_IN_FULL` within a second. The ring has the number of the last one in any case."""


class _Optimizers:
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
"""Called once, where an optimizer steps in a process that is no rank."""


def at_first_step(call: Callable[[], None]) -> None:
    """Where an optimizer steps in a process that is no rank: it may become one there."""
    _first_step[:] = [call]


def known_optimizer(optimizer: Any) -> Optimizer | None:
    """What is known of an optimizer that has stepped."""
    return _optimizers.known.get(optimizer)


def known() -> list[Optimizer]:
    """Of every living optimizer that has stepped."""
    return list(_optimizers.known.values())


def made() -> list[Any]:
    """Every optimizer that exists, whether it has stepped or not."""
    every = dict.fromkeys([*_optimizers.sites, *_optimizers.known])
    return [o for o in every if hasattr(o, "param_groups")]


def made_at(optimizer: Any) -> int:
    return _optimizers.sites.get(optimizer, -1)


def parameters() -> dict[int, Any]:
    """All parameters that any optimizer holds, by identity."""
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
    """The first hook before a step, before those of the user's that may still edit gradients."""
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
    elif _usual.begins(recorder, (optimizer, args), kwargs) is None:
        run_hook(recorder, PART, LOST, _begins, optimizer, args, kwargs)


def _last_pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Where there are others it is among the optimizer's own hooks, for as long as a step takes."""
    if (recorder := current.recorder) is None:
        return
    if _usual.begins(recorder, (optimizer, args), kwargs) is None:
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
        _usual.ends(recorder, optimizer, None)
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
    """The optimizer's part of a routine step."""
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
    """Somebody waits for this step, and says which is the next."""
    step.due = told_at(step.number)
    known.due_at = next_told_at(step.number)
    lifecycle.fast_step_due.fire(recorder, step)
    if step.due:
        lifecycle.step_due.fire(recorder, step)


def _join(recorder: Recorder, known: Optimizer, step: int, now: float) -> None:
    """Put a step on record: at once, or with those that follow at the same line soon."""
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
    """What was spent in each phase since the last time that somebody asked."""
    joined.data_s += loading.take_seconds()
    joined.forward_s += forwards.take_seconds()
    joined.backward_s += backwards.take_seconds()


def _emit_steps(recorder: Recorder) -> None:
    """Write the steps that wait, before anything that happened after them is."""
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
    """The ranks that hold pieces of the very parameters that this one does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {getattr(p, "device_mesh", None) for p in parameters}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _ends(recorder: Recorder, optimizer: Any) -> None:
    known = _optimizers.known.get(optimizer)
    if known is None or known.step is None:
        return
    now = _count(recorder, known)
    if not backwards.running():
        if known.step.closure:
            lifecycle.closure_ends.fire(recorder, known.step)
        lifecycle.step_ends.fire(recorder, known.step)
        steady_state.learn(recorder, known, known.step.site)
        if now >= _optimizers.pulse_at or recorder.step <= lifecycle.PULSES_FIRST:
            _beat(recorder, known.step, now)
    if known.steps == FIRST_STEPS + 1:  # what it cost to look at each of them is told apart
        recorder.emit_cost(anyway=True)


def _ends_fast(recorder: Recorder, optimizer: Any, _: None) -> None:
    expected = steady_state.expected
    known = expected.next.optimizer if expected is not None else None
    if expected is None or known is None or known.step is None:
        _ends(recorder, optimizer)
        return
    now = _count(recorder, known)
    expected.call_log.step_ended(recorder.step, now)
    expected.ring.enter(_USER, known.step.site, now)
    if expected.next.following is not None:
        expected.next, steady_state.stage = expected.next.following, Stage.BETWEEN
    else:
        expected.next, expected.averaged, steady_state.stage = expected.first, False, Stage.NONE
    if lifecycle.step_ends.on_fast_path:
        lifecycle.step_ends.fire_fast(recorder, known.step)
    if now >= _optimizers.pulse_at:
        _beat(recorder, known.step, now)


def _count(recorder: Recorder, known: Optimizer) -> float:
    """A step is over: count it, put it on record; the time."""
    now = time.monotonic()
    step, known.steps = known.steps, known.steps + 1
    recorder.step += 1
    recorder.moves += 1
    with recorder.lock:
        _join(recorder, known, step, now)
    return now


def _beat(recorder: Recorder, step: Step, now: float) -> None:
    _optimizers.pulses += 1
    _optimizers.pulse_at = now + lifecycle.until_pulse(_optimizers.pulses)
    lifecycle.pulse.fire(recorder, step)
    recorder.emit_cost()


_usual = FastPath(PART, LOST, _begins_fast, _ends_fast)
