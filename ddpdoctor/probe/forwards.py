"""Forwards of wrapped models."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from . import calls, models, modules, moments
from .models import Model
from .moments import Forward
from .patching import around, hide_hooks
from .recorder import Recorder
from .routine import Seen, Stage, Usual, routine

LOST = "forwards of wrapped models"


class _Forwards:
    def __init__(self) -> None:
        self.hooked = False
        self.adopting = False
        self.inside = 0
        self.count = 0
        self.seconds = 0.0
        self.grad_enabled: Callable[[], bool] = bool
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
    import torch

    _state.__init__()  # type: ignore[misc]
    _state.grad_enabled = torch.is_grad_enabled
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
        usual=Usual("DistributedDataParallel.forward", LOST, _begins_as_usual, _ends_as_usual),
    )


def _begins(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapper = args[0]
    model = models.of_wrapper(wrapper)
    if model is None and _state.adopting:
        model = models.adopted(active, wrapper)
    if model is None:
        return None
    _state.count += 1
    frame, site = active.sites.caller("forward")
    grad_enabled = _state.grad_enabled()
    sync = bool(wrapper.require_backward_grad_sync)
    number = model.forwards
    usual = grad_enabled and wrapper.training and not model.superseded
    if routine.expected is not None and grad_enabled:
        if usual and routine.expected.examined():
            routine.pause()
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
        routine.note(Seen(Forward, model, site, sync) if usual else None)
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


def _begins_as_usual(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward that a routine step has next."""
    step = routine.expected
    if step is None or (forward := (now := step.next).forward) is None:
        return None
    wrapper, model = step.wrapper(), step.model
    if (
        wrapper is None
        or wrapper is not args[0]
        or model.pending != now.pending
        or model.superseded
        or wrapper.require_backward_grad_sync is not now.sync
        or not (wrapper.training and _state.grad_enabled())
        or routine.stage == Stage.FORWARD
        or (routine.stage == Stage.NONE and step.examined())
    ):
        return None
    frame, site = active.sites.caller(now.hook)
    if site != now.site:
        return None
    routine.stage = Stage.FORWARD
    number = model.forwards
    model.began(forward, active.step)
    _state.count += 1
    _state.inside += 1
    forward.wrapper, forward.args, forward.kwargs = wrapper, args[1:], kwargs
    forward.frame, forward.error = frame, None
    calls.forward_opens(step.tape, forward)
    moments.forward_begins.passes(active, forward)
    if _due(number):
        moments.forward_due.happens(active, forward)
    forward.frame = None
    began = time.monotonic()
    now.entering(began)
    return forward, began


def _ends_as_usual(active: Recorder, token: tuple[Forward, float], result: Any) -> None:
    if routine.stage != Stage.FORWARD:  # something else happened meanwhile
        _ends(active, token, result, None)
        return
    step, (forward, began) = routine.expected, token
    assert step is not None
    ended = time.monotonic()
    step.next.leaving(ended)
    step.next = step.next.following or step.first
    routine.stage = Stage.BETWEEN
    _state.inside -= 1
    _state.seconds += ended - began
    forward.output = result
    calls.forward_closes(active, step.tape, forward)
    if moments.forward_ends.in_routine:
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
        routine.stop(active)
    moments.forward_ends.happens(active, forward)
    if not (forward.grad_enabled and forward.wrapper.training):
        moments.trial_ends.happens(active, forward)
    if error is not None:
        moments.forward_failed.happens(active, forward)
