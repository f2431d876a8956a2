"""What is evaluated: parameters and buffers at the first forward without gradients after training.

Where the model inside of the wrapper is called, no forward of the wrapper tells of it. `eval()` is
called rarely: only from there to the next forward of the model a hook waits for that. A part of the
model may be evaluated by itself.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

from ....events.drift import AGAIN
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.patching import around, on_restore
from ...recording.recorder import Recorder, guarded, shielded
from ...recording.torch_compat import compiling
from ...tensors.pending_digests import Row
from ...training import forwards, lifecycle, wrapped_models
from ...training.records import Forward, Step
from ...training.tracked_model import Model
from . import replica_digests

LOST = "drift at evaluation"

RARELY = 4
"""Forwards with gradients after which a part that is called without is evaluated; one that is
called in between is part of the training (it makes the targets, say)."""


class Evaluated:
    """How often a model was evaluated after so many forwards with gradients.

    Attributes:
        begun: `eval()` was called, and no forward has followed yet.
    """

    def __init__(self) -> None:
        self.forwards = -1
        self.times = 0
        self.begun = False


class Trial(NamedTuple):
    """Digests of an evaluation, perhaps on their way from the device; the rest as in `Digests`."""

    row: Row
    model: int
    kind: str
    point: str
    step: int
    site: int


class _Known:
    evaluated: defaultdict[int, Evaluated] = defaultdict(Evaluated)
    in_parts: defaultdict[int, Evaluated] = defaultdict(Evaluated)
    trials: list[Trial] = []
    settling = Subscriptions()
    """While digests are on their way."""


class _Awaited:
    handle: Any = None
    models: set[Model] = set()
    parts: list[tuple[weakref.ref[Any], Model]] = []
    forwards = Subscriptions()


def install() -> None:
    import torch.nn

    _Known.evaluated.clear()
    _Known.in_parts.clear()
    _Known.trials.clear()
    lifecycle.trial_ends.subscribe(_trial_ends, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)
    _Known.settling[:] = (lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),)
    _Awaited.models.clear()
    _Awaited.parts.clear()
    around(torch.nn.Module, "eval", before=_evaluating, lost=LOST)
    _Awaited.forwards[:] = (
        lifecycle.forward_begins.subscribe(_forward_begins, lost=LOST, awake=False),
    )
    on_restore(_let_go)


def _evaluating(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import torch

    module = args[0]
    for model in wrapped_models.live():
        inner = model.inner()
        if inner is None:
            continue
        whole = module is inner or module is model.ddp()
        if not (whole or module._modules):
            continue  # a layer, most likely frozen
        parts = list(inner.modules())
        if not (whole or any(module is part for part in parts)):
            continue
        if whole:
            _Known.evaluated[model.number].begun = True
        if compiling() or any(
            hasattr(m, "_orig_mod") or isinstance(m, torch.jit.ScriptModule) for m in parts
        ):
            return  # a hook would have it compiled anew
        if whole:
            _Awaited.models.add(model)
        elif not any(part() is module for part, _ in _Awaited.parts):
            _Awaited.parts.append((weakref.ref(module), model))
        if _Awaited.handle is None:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            _Awaited.handle = register(shielded("evaluation", _called, LOST))
            _Awaited.forwards.enable()


def _called(module: Any, args: Any) -> None:
    if module.training or forwards.running():
        return
    model = next((m for m in _Awaited.models if m.inner() is module), None)
    if model is not None:
        guarded("evaluation", lambda recorder: _inner(recorder, model), lost=LOST)
        return
    part = next((p for p in _Awaited.parts if p[0]() is module), None)
    if part is not None:
        guarded("evaluation", lambda recorder: _part(recorder, module, *part), lost=LOST)


def _part(recorder: Recorder, module: Any, part: weakref.ref[Any], model: Model) -> None:
    import torch

    if torch.is_grad_enabled():
        return
    _Awaited.parts[:] = (p for p in _Awaited.parts if p[0] is not part)
    _look_at_part(recorder, module, model, recorder.site())
    _rest()


def _look_at_part(recorder: Recorder, module: Any, model: Model, site: int) -> None:
    """The buffers of a part of the model, as `_look` of all: the others are still in training."""
    known = _Known.in_parts[model.number]
    if known.forwards != model.forwards:
        often = model.forwards - max(0, known.forwards) < RARELY
        known.forwards, known.times = model.forwards, AGAIN if often else 0
    if known.times >= AGAIN:
        return
    key, known.times = AGAIN * model.forwards + known.times, known.times + 1
    own = {id(buffer) for buffer in module.buffers()}
    waiting = replica_digests.digest(
        recorder, [b if id(b) in own else None for b in replica_digests.buffers(model)]
    )
    if waiting is not None:
        row = Row(key, 1, model.synced_backwards, waiting)
        _Known.trials.append(Trial(row, model.number, "buffers", "part", recorder.step, site))
    _emit(recorder)


def _inner(recorder: Recorder, model: Model) -> None:
    import torch

    if not torch.is_grad_enabled():
        _no_longer(model)
        _look(recorder, model, recorder.site())


def _trial_ends(recorder: Recorder, forward: Forward) -> None:
    if not (forward.grad_enabled or forward.error is not None or forward.wrapper.training):
        _look(recorder, forward.model, forward.site)


def _look(recorder: Recorder, model: Model, site: int) -> None:
    """The first forward without gradients after training: what is evaluated must be the same. So
    with those after an `eval()` without training in between: other weights may be loaded by then.
    """
    known = _Known.evaluated[model.number]
    begun, known.begun = known.begun, False
    if known.forwards != model.forwards:
        known.forwards, known.times = model.forwards, 0
        replica_digests.look_whole(model)
    elif not begun or known.times == AGAIN - 1:
        return
    else:
        known.times += 1
    parameters = [ref() for ref in model.parameters]
    kinds = {
        "parameters": [None if i in model.ignored else p for i, p in enumerate(parameters)],
        "buffers": replica_digests.buffers(model),
    }
    point, key = "again", AGAIN * model.forwards + known.times
    if not known.times:
        point, key = "eval", model.forwards
    for kind, tensors in kinds.items():
        waiting = replica_digests.digest(recorder, tensors)
        if waiting is not None:
            row = Row(key, 1, model.synced_backwards, waiting)
            _Known.trials.append(Trial(row, model.number, kind, point, recorder.step, site))
    _emit(recorder)


def _emit(recorder: Recorder, *, wait: bool = False) -> None:
    trials = _Known.trials
    while trials and trials[0].row.waiting.ready(wait=wait):
        row, model, kind, point, step, site = trials.pop(0)
        replica_digests.write(recorder, [row], model, -1, kind, point, step, site)
    _Known.settling.enable(bool(trials))


def _step_begins(recorder: Recorder, step: Step) -> None:
    _emit(recorder)


def _leaving(recorder: Recorder, _: None) -> None:
    _emit(recorder, wait=True)


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    _no_longer(forward.model)


def _no_longer(model: Model) -> None:
    _Awaited.models.discard(model)
    _Awaited.parts[:] = (p for p in _Awaited.parts if p[1] is not model)
    _rest()


def _rest() -> None:
    if not (_Awaited.models or _Awaited.parts):
        _let_go()


def _let_go() -> None:
    handle, _Awaited.handle = _Awaited.handle, None
    if handle is not None:
        handle.remove()
        _Awaited.forwards.disable()
