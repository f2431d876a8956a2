"""Which hyperparameters and loss scales does each optimizer step use, and which line set them?

Options of parameter groups are compared at steps that are due, the loss scale at every step of a
`GradScaler`; only changes are recorded.
"""

from __future__ import annotations

import numbers
import sys
import time
from collections.abc import Sequence
from math import isfinite
from typing import Any, ClassVar

from ....events import Hyperparameters, OptionsRead, Place, ScalerStep, SchedulerStep
from ...recording import hooks, torch_compat
from ...recording.hooks import Hook, Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...source.call_resolver import places_of
from ...source.parameter_writes import item_set_in_frames
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.logged_metrics import LoggedMetrics
from ...training.optimizers import Optimizers
from ...training.records import Optimizer, Step
from .limits import EXACT_BELOW, GROUPS_AT_MOST, LISTED_BELOW, SCALER_CALLS_AT_MOST, SELDOM

LEFT_OUT = frozenset(("params", "foreach", "fused", "capturable", "differentiable", "initial_lr"))
"""Options that do not change what a step computes, or (`initial_lr`) only by way of another."""


class Scaler:
    """One GradScaler, numbered in order of its first step, and its steps by optimizer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: WeakIdentityMap[ScaledSteps] = WeakIdentityMap()


class ScaledSteps:
    """The steps of one optimizer by one scaler, and what was last recorded of them."""

    def __init__(self) -> None:
        self.calls = self.backwards = 0
        self.emitted: tuple[Any, ...] = ()


class LastRecorded:
    """The options of one optimizer's parameter groups that were recorded last.

    Attributes:
        read: the last step at which they were read.
        scheduled: the step before which a scheduler was stepped last.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.read = self.scheduled = -1


class HyperparameterWatch(Watcher):
    """
    Attributes:
        scheduled: the program has stepped a scheduler; those that it steps in turn
            (`SequentialLR`) do not count.
        unread: numbers of optimizers whose options are to be read before their next step;
            meanwhile `before_step` is enabled.
    """

    lost = "hyper-parameters and loss scales"
    scheduled: ClassVar[Hook[Any]] = Hook("scheduled")

    def __init__(self) -> None:
        self.scalers: WeakIdentityMap[Scaler] = WeakIdentityMap()
        self.scalers_made = 0
        self.made: WeakIdentityMap[list[dict[str, Any]]] = WeakIdentityMap()
        self.scheduled_by: WeakIdentityMap[tuple[str, int]] = WeakIdentityMap()
        self.schedulers: WeakIdentityMap[int] = WeakIdentityMap()
        self.numbered = 0
        self.set_sites: WeakIdentityMap[int] = WeakIdentityMap()
        self.scheduler_calls: dict[int, int] = {}
        self.scheduler_depth = 0
        self.located: set[str] = set()
        self.unread: set[int] = set()
        self.before_step = Subscriptions()

    def install(self) -> None:
        import torch.amp
        from torch.optim import Optimizer, lr_scheduler

        self.around(Optimizer, "__init__", before=self._making, after=self._made)
        self.around(
            torch.amp.GradScaler, "step", before=self._scaler_begins, after=self._scaler_ends
        )
        self.around(torch.amp.GradScaler, "update", before=self._scaler_updates)
        self.around(lr_scheduler.LRScheduler, "__init__", before=self._scheduling)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and "step" in vars(kind):
                self.around(kind, "step", before=self._scheduler_begins, after=self._scheduler_ends)

    def _making(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        return args[0]

    def _made(self, recorder: Recorder, optimizer: Any, result: Any, error: Error) -> None:
        if optimizer is not None and error is None:
            self.made[optimizer] = _groups(optimizer)

    def _scheduling(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        if optimizer is not None and optimizer not in self.scheduled_by:
            self.scheduled_by[optimizer] = type(args[0]).__name__, recorder.site()

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        optimizer = step.optimizer()
        if optimizer is None:
            return
        emitted = step.known.notes.get(LastRecorded)
        if emitted is None:
            emitted = step.known.notes[LastRecorded] = LastRecorded()
        now = _groups(optimizer)
        read, emitted.read = emitted.read, step.number
        if emitted.groups == now:
            return
        scheduler, made = self.scheduled_by.pop(optimizer, ("", -1))
        through = self._set_through(recorder, emitted.groups or self.made.pop(optimizer, []), now)
        emitted.groups = now
        recorder.emit(
            Hyperparameters(
                at=time.monotonic(),
                optimizer=step.known.number,
                step=step.number,
                groups=tuple(now),
                site=step.site,
                set_sites={name: places[0].site for name, places in through.items()},
                set_through=through,
                scheduler=scheduler,
                scheduler_site=made,
                initial=_initial_rates(optimizer) if scheduler else (),
                read=read,
            )
        )

    @on(lifecycle.step_begins, during="before_step")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        if step.known.number in self.unread:
            self.unread.discard(step.known.number)
            self.before_step.enable(bool(self.unread))
            self._step_due(recorder, step)

    @on(hooks.leaving, lost="the last step at which options were read")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for known in Optimizers.current.known():
            emitted = known.notes.get(LastRecorded)
            if emitted is not None:
                recorder.emit(
                    OptionsRead(at=time.monotonic(), optimizer=known.number, step=emitted.read)
                )

    def _set_through(
        self, recorder: Recorder, before: list[dict[str, Any]], now: list[dict[str, Any]]
    ) -> dict[str, tuple[Place, ...]]:
        """Lines that assign the options that changed, looked up in the source once per option."""
        pairs = list(zip(before, now, strict=False))
        changed = {n for old, new in pairs for n in new if old.get(n) != new[n]} - self.located
        self.located |= changed
        found = {}
        for name in changed:
            place = item_set_in_frames(
                sys._getframe(1),
                lambda code: recorder.sites.kind(code) == "user",
                name,
                [group[name] for group in now if name in group],
            )
            if place is not None:
                found[name] = places_of(recorder.sites, place)
        return found

    def _scaler_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        scaler = args[0]
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        if optimizer is None or not scaler.is_enabled():
            return None
        known = Optimizers.current.known_optimizer(optimizer)
        return scaler, optimizer, known.steps if known else 0, _scale(scaler), recorder.site()

    def _scaler_ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        scaler, optimizer, before, scale, site = token
        state = self.scalers.get(scaler)
        if state is None:
            state = self.scalers[scaler] = Scaler(self.scalers_made)
            self.scalers_made += 1
        mine = state.steps.get(optimizer)
        if mine is None:
            mine = state.steps[optimizer] = ScaledSteps()
        call, mine.calls = mine.calls, mine.calls + 1
        synced = Backwards.current.synced
        each, mine.backwards = synced - mine.backwards, synced
        known = Optimizers.current.known_optimizer(optimizer)
        skipped = (known.steps if known else 0) == before
        set_site = self.set_sites.pop(scaler, -1)
        now = scale, set_site, each
        if (now == mine.emitted and not skipped) or call >= SCALER_CALLS_AT_MOST:
            return
        mine.emitted = now
        recorder.emit(
            ScalerStep(
                at=time.monotonic(),
                scaler=state.number,
                optimizer=known.number if known else -1,
                call=call,
                step=before,
                scale=scale,
                skipped=skipped,
                site=site,
                kind=type(scaler).__name__,
                set_site=set_site,
                backwards=synced,
                each=each,
            )
        )

    def _scaler_updates(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        scale = args[1] if len(args) > 1 else kwargs.get("new_scale")
        if scale is not None and args[0].is_enabled():
            self.set_sites[args[0]] = recorder.site()

    def _scheduler_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        self.scheduler_depth += 1
        if self.scheduler_depth > 1 or not torch_compat.is_made(args[0]):
            return None
        if recorder.step:
            self._scheduler_steps(recorder, args, kwargs)
            if (seldom := _stepped_seldom(args[0])) is not None:
                optimizer, known, emitted = seldom
                if emitted.groups == _groups(optimizer):  # so it was in all steps until now
                    emitted.read = known.steps - 1
                self.unread.add(known.number)
                self.before_step.enable()
        return args[0]

    def _scheduler_steps(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        site = recorder.site()
        call = self.scheduler_calls.get(site, 0)
        self.scheduler_calls[site] = call + 1
        if call < 20 or call & (call - 1) == 0:
            known = Optimizers.current.known_optimizer(getattr(args[0], "optimizer", None))
            metric = _metric(args, kwargs)
            by_name = LoggedMetrics.current.used_by_framework
            recorder.emit(
                SchedulerStep(
                    at=time.monotonic(),
                    kind=type(args[0]).__name__,
                    step=recorder.step,
                    call=call,
                    site=site,
                    optimizer=-1 if known is None else known.number,
                    scheduler=self._number_of(args[0]),
                    metric=metric,
                    logged=None if metric is None else by_name(recorder),
                )
            )

    def _number_of(self, scheduler: Any) -> int:
        number = self.schedulers.get(scheduler)
        if number is None:
            number = self.schedulers[scheduler] = self.numbered
            self.numbered += 1
        return number

    def _scheduler_ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self.scheduler_depth -= 1
        if token is not None and error is None:
            self.scheduled.fire(recorder, token)


def _stepped_seldom(scheduler: Any) -> tuple[Any, Optimizer, LastRecorded] | None:
    """A scheduler's optimizer, whose next step is to be looked at, as light steps are not, and what
    was last recorded of it; None where its schedulers step with every few steps."""
    optimizer = getattr(scheduler, "optimizer", None)
    known = Optimizers.current.known_optimizer(optimizer)
    emitted = known.notes.get(LastRecorded) if known is not None else None
    if known is None or emitted is None:
        return None
    before, emitted.scheduled = emitted.scheduled, known.steps
    return (optimizer, known, emitted) if known.steps - before >= SELDOM else None


def _metric(args: Args, kwargs: Kwargs) -> float | None:
    """What a call of `ReduceLROnPlateau.step` is given, None for other schedulers."""
    if not hasattr(args[0], "mode_worse"):
        return None
    number = _number(args[1] if len(args) > 1 else kwargs.get("metrics"))
    return float(number) if isinstance(number, (int, float)) else None


def _initial_rates(optimizer: Any) -> tuple[float, ...]:
    """The rates from which schedulers start, of the groups that have one."""
    found = (group.get("initial_lr") for group in optimizer.param_groups)
    return tuple(float(rate) for rate in found if isinstance(rate, (int, float)))


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [_values(g) for g in optimizer.param_groups[:GROUPS_AT_MOST]]


def _values(group: dict[str, Any]) -> dict[str, float | bool | str]:
    values: dict[str, float | bool | str] = {}
    for name, value in group.items():
        if name in LEFT_OUT or value is None:
            continue
        kind = type(value)
        if kind is bool or (kind is float and isfinite(value)):  # nearly all of them
            values[name] = value
        elif (several := _elements(value)) is not None:
            emitted = [v if type(v) is str or v is None else _number(v) for v in several]
            if all(t is not None or v is None for t, v in zip(emitted, several, strict=True)):
                values[name] = ", ".join(map(str, emitted))
        elif (number := _number(value)) is not None:
            values[name] = number
    return values


def _elements(value: Any) -> Sequence[Any] | None:
    """The elements of a short sequence, whatever their type; None for any other value."""
    if isinstance(value, (tuple, list)):
        return value if len(value) < LISTED_BELOW else None
    listed = _of_numpy(value) and getattr(value, "ndim", 0) == 1 and value.size < LISTED_BELOW
    return value.tolist() if listed else None


def _number(value: Any) -> float | bool | str | None:
    """A number of any library as a Python number, infinite ones as text; None if it is no number or
    lies on a device."""
    kind = type(value)
    if kind is bool or (kind is float and isfinite(value)):
        return value
    try:
        if kind is not int and kind is not float:
            value = _plain(value)
        if type(value) is bool or (type(value) is int and abs(value) < EXACT_BELOW):
            return value
        number = float(value)
    except Exception:  # whatever it is, it is the user's
        return None
    return number if isfinite(number) else str(number)


def _plain(value: Any) -> Any:
    """The value of a NumPy scalar, of a tensor with one element, or of another number type.

    Returns None for a tensor on a device.

    Raises:
        TypeError: it is no number.
    """
    if _of_numpy(value):
        return value.item()
    if getattr(value, "numel", None) is not None:
        return value.detach().item() if value.is_cpu else None
    if isinstance(value, numbers.Number):
        return int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    raise TypeError


def _of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "item")


def _scale(scaler: Any) -> float:
    held = getattr(scaler, "_scale", None)
    if held is None:
        return float(getattr(scaler, "_init_scale", -1.0))
    return float(held) if held.is_cpu else -1.0
