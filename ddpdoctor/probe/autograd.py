"""Backwards: which models they belong to, whether they communicated, what got no gradient."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from . import models, moments
from .looks import Look
from .models import Model
from .moments import Backward
from .patching import around
from .recorder import Recorder, recorder

LOST = "backwards, and with them unused parameters and unsynchronised steps"


class _Backwards:
    depth = 0
    nested = 0
    count = 0
    synced = 0
    seconds = 0.0


_state = _Backwards()


def running() -> bool:
    """Whether a backward is running."""
    return _state.depth > 0


def count() -> int:
    """Outermost backwards so far in this process."""
    return _state.count


def synced() -> int:
    """Those that communicated."""
    return _state.synced


def take_seconds() -> float:
    spent, _state.seconds = _state.seconds, 0.0
    return spent


def install() -> None:
    import torch.autograd

    _state.depth = _state.count = _state.synced = 0
    around(torch.autograd, "backward", before=_begins, after=_ends, lost=LOST)


def _begins(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _state.depth += 1
    if _state.depth > 1:  # re-entrant checkpointing runs backward inside backward
        _state.nested += 1
        return None
    _state.nested = 0
    tensors = args[0] if args else kwargs.get("tensors", ())
    roots = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
    frame = active.sites.user_frame(sys._getframe(1))
    backward = Backward(_state.count, active.sites.at(frame), roots, time.monotonic(), frame)
    backward.looks = [Look(model) for model in (*models.live(), *models.discarded())]
    for look in backward.looks:
        if look.firing is not None and look.model.pending_sync:
            look.firing.on_complete = partial(_complete, active, backward, look.model)
    moments.backward_begins.happens(active, backward)
    backward.frame = None
    return backward


def _complete(active: Recorder, backward: Backward, model: Model) -> None:
    if recorder() is active:
        moments.gradients_ready.happens(active, (backward, model))


def _ends(active: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _state.depth -= 1
    if token is None:
        return
    backward: Backward = token
    _state.seconds += time.monotonic() - backward.began
    backward.error, backward.nested = error, _state.nested
    for look in backward.looks:
        if look.firing is not None:
            look.firing.stop()
            backward.fired[look.model.number] = look.firing.counts
    if error is None:
        _state.count += 1
        for look in backward.looks:
            look.again()
        waiting = sum(look.expected for look in backward.looks)
        for look in backward.looks:
            _attribute(backward, look, alone=waiting == 1)
        _state.synced += bool(backward.synced)
    moments.backward_ends.happens(active, backward)


def _attribute(backward: Backward, look: Look, *, alone: bool) -> None:
    """Tell whether this backward was (also) that model's, and what it left out."""
    model = look.model
    communicated, touched = look.communicated(), look.touched()
    if communicated and (look.expected or touched):
        backward.synced.add(model.number)
    if not touched and not (alone and look.expected and communicated):
        return  # this backward was of another model: its own is still to come
    model.backwards += 1
    if not look.expected:
        backward.unannounced.append((model, communicated))
        return
    backward.models.append(model)
    backward.expected_sync[model.number] = model.pending_sync
    model.synced_backwards += model.pending_sync
    model.pending, model.pending_sync = 0, False
    untouched = look.untouched()
    if untouched is not None:
        backward.untouched[model.number] = untouched
