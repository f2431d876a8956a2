"""Do all ranks evaluate the same weights?

Parameters and buffers are digested at the first forward without gradients after training. Programs
may call the inner model, or a part of it, and not the wrapper; a global forward hook sees that, and
is registered only between a call of `eval()` and the model's next forward.
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
"""A part that is called without gradients counts as evaluated if at least this many forwards with
gradients came before. One that is called more often belongs to training: it computes targets, say.
"""


class Evaluated:
    """The evaluations of a model since its last forward with gradients.

    Attributes:
        forwards: forwards with gradients before them; -1 before the first evaluation.
        times: evaluations recorded since, not counting the first.
        begun: `eval()` was called, and no forward has followed yet.
    """

    def __init__(self) -> None:
        self.forwards = -1
        self.times = 0
        self.begun = False


class PendingDigests(NamedTuple):
    """Digests of an evaluation that may still be on their way from the device; the other fields are
    those of `Digests`."""

    row: Row
    model: int
    kind: str
    point: str
    step: int
    site: int


class _Known:
    evaluated: defaultdict[int, Evaluated] = defaultdict(Evaluated)
    in_parts: defaultdict[int, Evaluated] = defaultdict(Evaluated)
    pending: list[PendingDigests] = []
    settling = Subscriptions()
    """Enabled while digests are on their way."""


class _Hook:
    """The global forward hook and what it waits for.

    Attributes:
        models: models in evaluation mode whose next forward is recorded; `parts` submodules that
            were put there on their own.
        forwards: subscription to forwards of wrappers, which end the wait.
    """

    handle: Any = None
    models: set[Model] = set()
    parts: list[tuple[weakref.ref[Any], Model]] = []
    forwards = Subscriptions()


def install() -> None:
    import torch.nn

    _Known.evaluated.clear()
    _Known.in_parts.clear()
    _Known.pending.clear()
    lifecycle.trial_ends.subscribe(_trial_ends, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)
    _Known.settling[:] = (lifecycle.step_begins.subscribe(_step_begins, lost=LOST, enabled=False),)
    _Hook.models.clear()
    _Hook.parts.clear()
    around(torch.nn.Module, "eval", before=_eval_called, lost=LOST)
    _Hook.forwards[:] = (
        lifecycle.forward_begins.subscribe(_forward_begins, lost=LOST, enabled=False),
    )
    on_restore(_remove)


def _eval_called(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            return  # a global hook would make torch.compile compile it again
        if whole:
            _Hook.models.add(model)
        elif not any(part() is module for part, _ in _Hook.parts):
            _Hook.parts.append((weakref.ref(module), model))
        if _Hook.handle is None:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            _Hook.handle = register(shielded("evaluation", _called, LOST))
            _Hook.forwards.enable()


def _called(module: Any, args: Any) -> None:
    if module.training or forwards.running():
        return
    model = next((m for m in _Hook.models if m.inner() is module), None)
    if model is not None:
        guarded("evaluation", lambda recorder: _model_called(recorder, model), lost=LOST)
        return
    part = next((p for p in _Hook.parts if p[0]() is module), None)
    if part is not None:
        guarded("evaluation", lambda recorder: _part_called(recorder, module, *part), lost=LOST)


def _part_called(recorder: Recorder, module: Any, part: weakref.ref[Any], model: Model) -> None:
    import torch

    if torch.is_grad_enabled():
        return
    _Hook.parts[:] = (p for p in _Hook.parts if p[0] is not part)
    _record_part(recorder, module, model, recorder.site())
    _remove_if_idle()


def _record_part(recorder: Recorder, module: Any, model: Model, site: int) -> None:
    """Digest the buffers of a part that is evaluated; other parts are still in training."""
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
        _Known.pending.append(
            PendingDigests(row, model.number, "buffers", "part", recorder.step, site)
        )
    _emit(recorder)


def _model_called(recorder: Recorder, model: Model) -> None:
    import torch

    if not torch.is_grad_enabled():
        _stop_waiting_for(model)
        _record_evaluation(recorder, model, recorder.site())


def _trial_ends(recorder: Recorder, forward: Forward) -> None:
    if not (forward.grad_enabled or forward.error is not None or forward.wrapper.training):
        _record_evaluation(recorder, forward.model, forward.site)


def _record_evaluation(recorder: Recorder, model: Model, site: int) -> None:
    """Digest a model at its first forward without gradients after training.

    Later evaluations without training in between are recorded if `eval()` was called again, up to
    `AGAIN` times: other weights may have been loaded by then.
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
            _Known.pending.append(
                PendingDigests(row, model.number, kind, point, recorder.step, site)
            )
    _emit(recorder)


def _emit(recorder: Recorder, *, wait: bool = False) -> None:
    pending = _Known.pending
    while pending and pending[0].row.waiting.ready(wait=wait):
        row, model, kind, point, step, site = pending.pop(0)
        replica_digests.write(recorder, [row], model, -1, kind, point, step, site)
    _Known.settling.enable(bool(pending))


def _step_begins(recorder: Recorder, step: Step) -> None:
    _emit(recorder)


def _leaving(recorder: Recorder, _: None) -> None:
    _emit(recorder, wait=True)


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    _stop_waiting_for(forward.model)


def _stop_waiting_for(model: Model) -> None:
    _Hook.models.discard(model)
    _Hook.parts[:] = (p for p in _Hook.parts if p[1] is not model)
    _remove_if_idle()


def _remove_if_idle() -> None:
    if not (_Hook.models or _Hook.parts):
        _remove()


def _remove() -> None:
    handle, _Hook.handle = _Hook.handle, None
    if handle is not None:
        handle.remove()
        _Hook.forwards.disable()
