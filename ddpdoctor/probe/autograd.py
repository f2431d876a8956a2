"""Backwards: which models they belong to, whether they communicated, what got no gradient."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from . import models, moments
from .gradients import version
from .looks import Look
from .models import Model
from .moments import Backward
from .patching import around
from .recorder import Recorder, recorder
from .routine import Expected, Stage, routine
from .torch_private import sequence_number

LOST = "backwards, and with them unused parameters and unsynchronised steps"


class _Backwards:
    depth = 0
    nested = 0
    count = 0
    synced = 0
    seconds = 0.0
    step = -1


_state = _Backwards()


def running() -> bool:
    """Whether a backward is running."""
    return _state.depth > 0


def count() -> int:
    """Outermost backwards so far in this process."""
    return _state.count


def since(step: int) -> bool:
    """Whether one ended after that many optimizer steps."""
    return _state.step >= step


def synced() -> int:
    """Those that communicated."""
    return _state.synced


def take_seconds() -> float:
    spent, _state.seconds = _state.seconds, 0.0
    return spent


def install() -> None:
    import torch.autograd

    _state.depth = _state.count = _state.synced = 0
    _state.step = -1
    around(torch.autograd, "backward", before=_begins, after=_ends, lost=LOST)


def _begins(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _state.depth += 1
    if _state.depth > 1:  # re-entrant checkpointing runs backward inside backward
        _state.nested += 1
        return None
    _state.nested = 0
    active.moves += 1
    tensors = args[0] if args else kwargs.get("tensors", ())
    roots = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
    frame, site = active.sites.caller("backward")
    if routine.expected is not None:
        if _as_usual(routine.expected, site):
            return _begins_as_usual(active, routine.expected, roots, frame)
        routine.stop(active)
    backward = Backward(_state.count, site, roots, time.monotonic(), frame)
    for model in (*models.live(), *models.discarded()):
        look = Look(model)
        backward.looks.append(look)
        if look.firing is not None and model.pending_sync:
            look.firing.on_complete = partial(_complete, active, backward, model)
    moments.backward_begins.happens(active, backward)
    backward.frame = None
    return backward


def _as_usual(step: Expected, site: int) -> bool:
    """Whether this is the backward that a routine step has next."""
    wrapper = step.wrapper()
    return (
        routine.stage == Stage.FORWARD_DONE
        and site == step.backward.site
        and step.model.pending == 1
        and wrapper is not None
        and bool(wrapper.require_backward_grad_sync)
    )


def _begins_as_usual(
    active: Recorder, step: Expected, roots: tuple[Any, ...], frame: Any
) -> Backward:
    backward = step.backward
    backward.number, backward.roots, backward.frame = _state.count, roots, frame
    backward.began, backward.error = time.monotonic(), None
    backward.synced.clear()
    step.sequence, step.before = _collectives(step), version(step.model.sampled[0]())
    routine.stage = Stage.BACKWARD
    moments.backward_begins.passes(active, backward)
    backward.frame = None
    return backward


def _ends_as_usual(active: Recorder, step: Expected) -> None:
    """The model's gradients are there, and were averaged if its group communicated. If neither is
    so, the backward was of something else, and the model's own is still to come."""
    backward, model = step.backward, step.model
    averaged = _collectives(step) != step.sequence
    backward.nested = _state.nested
    _state.count += 1
    _state.step = active.step
    if averaged:
        backward.synced.add(model.number)
        _state.synced += 1
    if averaged or version(model.sampled[0]()) != step.before:
        routine.stage = Stage.BACKWARD_DONE
        model.reached(active.step, averaged)
        model.answered()
    else:
        routine.stage = Stage.FORWARD_DONE
        backward.models = []
    moments.backward_ends.passes(active, backward)
    backward.roots = ()
    routine.settle(active, broken=not averaged)


def _collectives(step: Expected) -> int:
    return sequence_number(getattr(step.wrapper(), "process_group", None))


def _complete(active: Recorder, backward: Backward, model: Model) -> None:
    if recorder() is active:
        moments.gradients_ready.happens(active, (backward, model))


def _ends(active: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _state.depth -= 1
    if token is None:
        return
    backward: Backward = token
    _state.seconds += time.monotonic() - backward.began
    step = routine.expected
    if step is not None and backward is step.backward:
        if error is None:
            _ends_as_usual(active, step)
            return
        routine.stage = Stage.FORWARD_DONE  # as far as it got
        routine.stop(active)
    backward.error, backward.nested = error, _state.nested
    waiting = 0
    for look in backward.looks:
        waiting += look.expected
        if look.firing is not None:
            look.firing.stop()
            backward.fired[look.model.number] = look.firing.counts
        if error is None:
            look.again()
    if error is None:
        _state.count += 1
        _credit(backward.looks)
        for look in backward.looks:
            _attribute(backward, look, active.step, alone=waiting == 1)
        _state.synced += bool(backward.synced)
        _state.step = active.step
    routine.note(_routine_part(backward))
    moments.backward_ends.happens(active, backward)
    if backward.untouched:
        moments.backward_examined.happens(active, backward)
    if backward.unannounced:
        moments.backward_astray.happens(active, backward)
    if error is not None:
        moments.backward_failed.happens(active, backward)


def _routine_part(backward: Backward) -> tuple[Model, int] | None:
    """Model and line of a backward that may be part of a routine step."""
    alone = len(backward.looks) == len(backward.models) == len(backward.synced) == 1
    if not alone or backward.error is not None or backward.looks[0].sequence < 0:
        return None
    return backward.models[0], backward.site


def _credit(looks: list[Look]) -> None:
    """Models that share a group share its count: where DDP was to average one that this backward
    reached, another that it was not to average did not communicate."""
    moved = [look for look in looks if look.communicated]
    if len(moved) < 2:
        return
    due = {id(look.group) for look in moved if look.model.armed and look.touched}
    for look in moved:
        if not look.model.armed and id(look.group) in due:
            look.communicated = False


def _attribute(backward: Backward, look: Look, step: int, *, alone: bool) -> None:
    """Tell whether this backward was (also) that model's, and what it left out."""
    model = look.model
    communicated, touched = look.communicated, look.touched
    if communicated and (look.expected or touched):
        backward.synced.add(model.number)
    if not touched and not (alone and look.expected and communicated):
        return  # this backward was of another model: its own is still to come
    if not look.expected:
        model.reached(step, communicated)
        backward.unannounced.append((model, communicated))
        return
    backward.models.append(model)
    backward.expected_sync[model.number] = model.pending_sync
    model.reached(step, communicated)
    model.answered()
    untouched = look.untouched()
    if untouched is not None:
        backward.untouched[model.number] = untouched
