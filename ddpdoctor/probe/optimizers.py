"""Optimizers and their steps."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ..events import OptimizerSeen, StepDone
from . import autograd, data, models, moments
from .moments import Step
from .pace import FIRST_STEPS
from .patching import around, on_restore
from .recorder import Recorder, guarded, recorder

LOST = "optimizer steps"

STEPS_IN_FULL = 2000
"""Steps of one optimizer that get a record each; later ones are joined, one record a second."""


class Optimizer:
    """What the probe knows of one optimizer.

    Attributes:
        notes: what watchers know of it, by their own class; dies with the optimizer.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.began = 0.0
        self.step: Step | None = None
        self.notes: dict[type, Any] = {}
        self.backwards = 0
        self.synced = 0
        self.told_step = -1
        self.told_at = 0.0


class _Optimizers:
    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[Any, Optimizer] = weakref.WeakKeyDictionary()
        self.sites: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.count = 0
        self.last_step_at = 0.0
        self.seconds = 0.0
        self.pulse_at = 0.0


_optimizers = _Optimizers()


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


def held() -> dict[int, Any]:
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


def _making(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _optimizers.sites[args[0]] = active.site()


def _pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    if recorder() is not None:
        guarded(
            "optimizer-step", lambda active: _begins(active, optimizer, args, kwargs), lost=LOST
        )


def _post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    if recorder() is not None:
        guarded("optimizer-step", lambda active: _ends(active, optimizer), lost=LOST)


def _begins(active: Recorder, optimizer: Any, args: Any, kwargs: Any) -> None:
    closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
    known = _optimizers.known.get(optimizer)
    if known is None:
        known = _optimizers.known[optimizer] = Optimizer(_optimizers.count)
        _optimizers.count += 1
        _tell_seen(active, optimizer, known)
        if not _optimizers.last_step_at:
            _optimizers.last_step_at = active.started
    known.began = time.monotonic()
    known.step = Step(
        weakref.ref(optimizer), known, known.steps, active.site(), known.began, closure
    )
    # An optimizer that steps inside the backward runs under DDP's lock, one parameter at a time:
    # watchers that ask DDP anything would wait for ever.
    if not autograd.running():
        moments.step_begins.happens(active, known.step)


def _tell_seen(active: Recorder, optimizer: Any, known: Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    owners = []
    owned: set[int] = set()
    for model in models.live():
        mine = {id(p) for ref in model.parameters if (p := ref()) is not None}
        if mine & held:
            owners.append(model.number)
            owned |= mine
    active.emit(
        OptimizerSeen(
            at=time.monotonic(),
            optimizer=known.number,
            kind=type(optimizer).__name__,
            site=_optimizers.sites.get(optimizer, -1),
            models=tuple(owners),
            parameters=len(held),
            foreign=len(held - owned),
        )
    )


def _ends(active: Recorder, optimizer: Any) -> None:
    known = _optimizers.known.get(optimizer)
    if known is None or known.step is None:
        return
    now = time.monotonic()
    step, known.steps = known.steps, known.steps + 1
    active.step += 1
    backwards, synced = autograd.count(), autograd.synced()
    _optimizers.seconds += now - known.began
    if step < STEPS_IN_FULL or now - known.told_at >= 1.0:
        active.emit(
            StepDone(
                at=now,
                optimizer=known.number,
                step=step,
                count=step - known.told_step,
                site=known.step.site,
                wall_s=now - _optimizers.last_step_at,
                data_s=data.take_seconds(),
                forward_s=models.take_forward_seconds(),
                backward_s=autograd.take_seconds(),
                optimizer_s=_optimizers.seconds,
                backwards=backwards - known.backwards,
                synced=synced - known.synced,
            )
        )
        _optimizers.last_step_at, _optimizers.seconds = now, 0.0
        known.told_step, known.told_at = step, now
        known.backwards, known.synced = backwards, synced
    if not autograd.running():
        moments.step_ends.happens(active, known.step)
        if now >= _optimizers.pulse_at or active.step <= moments.PULSES_FIRST:
            _optimizers.pulse_at = now + moments.PULSE_S
            moments.pulse.happens(active, known.step)
            active.tell_cost()
    if step == FIRST_STEPS:  # what it cost to look at each of them is told apart
        active.tell_cost(anyway=True)
