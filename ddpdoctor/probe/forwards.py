"""Forwards of wrapped models."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

from . import models, modules, moments
from .models import Model
from .moments import Forward
from .patching import around, hide_hooks
from .recorder import Recorder
from .routine import Expected, Stage, routine

LOST = "forwards of wrapped models"


class _Forwards:
    def __init__(self) -> None:
        self.hooked = False
        self.adopting = False
        self.inside = 0
        self.count = 0
        self.seconds = 0.0
        self.registrations = 0


_state = _Forwards()


def count() -> int:
    """Forwards of all wrappers so far, with and without gradients."""
    return _state.count


def running() -> bool:
    """Whether a wrapper's forward is running."""
    return _state.inside > 0


def take_seconds() -> float:
    """Seconds spent in them since the last call."""
    spent, _state.seconds = _state.seconds, 0.0
    return spent


def install() -> None:
    _state.__init__()  # type: ignore[misc]
    moments.wrapped.subscribe(_wrapped, lost=LOST)


def adopt(active: Recorder) -> None:
    """Models that were wrapped before this process was watched are met at their next forward."""
    _state.adopting = True
    if "torch._dynamo" in sys.modules:
        _hook()


def _wrapped(active: Recorder, model: Model) -> None:
    _hook()


def _hook() -> None:
    # Wrapping forward needs torch._dynamo, which DDP's constructor has imported by now; importing
    # it earlier would cost every script a second.
    if _state.hooked:
        return
    _state.hooked = True
    hide_hooks()
    from torch.nn.parallel.distributed import DistributedDataParallel

    around(
        DistributedDataParallel,
        "forward",
        before=_begins,
        after=_ends,
        lost=LOST,
        traced=True,
    )


def _begins(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    wrapper = args[0]
    step = routine.expected
    if step is not None and step.wrapper() is wrapper:
        model: Model | None = step.model
    else:
        model = models.of_wrapper(wrapper)
    if model is None and _state.adopting:
        model = models.adopted(active, wrapper)
    if model is None:
        return None
    _state.count += 1
    frame, site = active.sites.caller("forward")
    grad_enabled = torch.is_grad_enabled()
    sync = bool(wrapper.require_backward_grad_sync)
    number = model.forwards
    usual = grad_enabled and sync and wrapper.training and not model.superseded
    if step is not None and grad_enabled:
        if model.examined():
            routine.pause()
        elif usual and _as_usual(step, model, site):
            return _begins_as_usual(active, step.forward, args, kwargs, frame)
        routine.stop(active)
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
        models.supersede(model)
    if grad_enabled:
        model.began(forward, active.step)
        routine.note((model, site) if usual else None)
    _state.inside += 1
    moments.forward_begins.happens(active, forward)
    if not (grad_enabled and wrapper.training):
        moments.trial_begins.happens(active, forward)
    if grad_enabled and _due(number):
        moments.forward_due.happens(active, forward)
    forward.frame = None
    return forward, time.monotonic()


def _due(number: int) -> bool:
    """Whether a model's forward of that number is looked at closely: also where parameters were
    made since the last one, which may be the model's."""
    made = modules.registrations()
    new, _state.registrations = made != _state.registrations, made
    return new or moments.looked_at(number)


def _as_usual(step: Expected, model: Model, site: int) -> bool:
    """Whether this is the forward that a routine step begins with."""
    return routine.stage == Stage.NONE and model is step.model and site == step.forward.site


def _begins_as_usual(
    active: Recorder,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType | None,
) -> tuple[Forward, float]:
    forward.wrapper, forward.frame, forward.error = args[0], frame, None
    forward.args, forward.kwargs = args[1:], kwargs
    routine.stage = Stage.FORWARD
    number = forward.model.forwards
    forward.model.began(forward, active.step)
    _state.inside += 1
    moments.forward_begins.passes(active, forward)
    if _due(number):
        moments.forward_due.happens(active, forward)
    forward.frame = None
    return forward, time.monotonic()


def _ends_as_usual(active: Recorder, forward: Forward) -> None:
    routine.stage = Stage.FORWARD_DONE
    moments.forward_ends.passes(active, forward)
    forward.wrapper = forward.output = None
    forward.args, forward.kwargs = (), {}


def _ends(active: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    if token is None:
        return
    forward, began = token
    _state.inside -= 1
    _state.seconds += time.monotonic() - began
    forward.output, forward.error = result, error
    if routine.stage == Stage.FORWARD:
        if error is None and routine.expected is not None and forward is routine.expected.forward:
            _ends_as_usual(active, forward)
            return
        routine.stop(active)
    moments.forward_ends.happens(active, forward)
    if not (forward.grad_enabled and forward.wrapper.training):
        moments.trial_ends.happens(active, forward)
    if error is not None:
        moments.forward_failed.happens(active, forward)
