"""What is evaluated: parameters and buffers at the first forward without gradients after training.

Where the model inside of the wrapper is called, no forward of the wrapper tells of it. `eval()` is
called rarely: only from there to the next forward of the model a hook waits for that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from ..events.drift import AGAIN
from . import drift, forwards, models, moments
from .models import Model
from .moments import Forward, Step, Subscriptions
from .patching import around, on_restore
from .recorder import Recorder, guarded, shielded
from .rows import Row
from .torch_private import compiling

LOST = "drift at evaluation"


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
    trials: list[Trial] = []
    settling = Subscriptions()
    """While digests are on their way."""


class _Awaited:
    handle: Any = None
    models: set[Model] = set()
    forwards = Subscriptions()


def install() -> None:
    import torch.nn

    _Known.evaluated.clear()
    _Known.trials.clear()
    moments.trial_ends.subscribe(_trial_ends, lost=LOST)
    moments.leaving.subscribe(_leaving, lost=LOST)
    _Known.settling[:] = (moments.step_begins.subscribe(_step_begins, lost=LOST, awake=False),)
    _Awaited.models.clear()
    around(torch.nn.Module, "eval", before=_evaluating, lost=LOST)
    _Awaited.forwards[:] = (
        moments.forward_begins.subscribe(_forward_begins, lost=LOST, awake=False),
    )
    on_restore(_let_go)


def _evaluating(active: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    import torch

    module = args[0]
    for model in models.live():
        inner = model.inner()
        if inner is None or not (module is inner or module is model.ddp()):
            continue
        _Known.evaluated[model.number].begun = True
        parts = inner.modules()
        if compiling() or any(
            hasattr(m, "_orig_mod") or isinstance(m, torch.jit.ScriptModule) for m in parts
        ):
            return  # a hook would have it compiled anew
        _Awaited.models.add(model)
        if _Awaited.handle is None:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            _Awaited.handle = register(shielded("evaluation", _called, LOST))
            _Awaited.forwards.wake()


def _called(module: Any, args: Any) -> None:
    if module.training or forwards.running():
        return
    model = next((m for m in _Awaited.models if m.inner() is module), None)
    if model is not None:
        guarded("evaluation", lambda active: _inner(active, model), lost=LOST)


def _inner(active: Recorder, model: Model) -> None:
    import torch

    if not torch.is_grad_enabled():
        _no_longer(model)
        _look(active, model, active.site())


def _trial_ends(active: Recorder, forward: Forward) -> None:
    if not (forward.grad_enabled or forward.error is not None or forward.wrapper.training):
        _look(active, forward.model, forward.site)


def _look(active: Recorder, model: Model, site: int) -> None:
    """The first forward without gradients after training: what is evaluated must be the same. So
    with those after an `eval()` without training in between: other weights may be loaded by then.
    """
    known = _Known.evaluated[model.number]
    begun, known.begun = known.begun, False
    if known.forwards != model.forwards:
        known.forwards, known.times = model.forwards, 0
        drift.look_whole(model)
    elif not begun or known.times == AGAIN - 1:
        return
    else:
        known.times += 1
    parameters = [ref() for ref in model.parameters]
    kinds = {
        "parameters": [None if i in model.ignored else p for i, p in enumerate(parameters)],
        "buffers": drift.buffers(model),
    }
    point, key = "again", AGAIN * model.forwards + known.times
    if not known.times:
        point, key = "eval", model.forwards
    for kind, tensors in kinds.items():
        waiting = drift.digest(active, tensors)
        if waiting is not None:
            row = Row(key, 1, model.synced_backwards, waiting)
            _Known.trials.append(Trial(row, model.number, kind, point, active.step, site))
    _tell(active)


def _tell(active: Recorder, *, wait: bool = False) -> None:
    trials = _Known.trials
    while trials and trials[0].row.waiting.ready(wait=wait):
        row, model, kind, point, step, site = trials.pop(0)
        drift.write(active, [row], model, -1, kind, point, step, site)
    _Known.settling.wake(bool(trials))


def _step_begins(active: Recorder, step: Step) -> None:
    _tell(active)


def _leaving(active: Recorder, _: None) -> None:
    _tell(active, wait=True)


def _forward_begins(active: Recorder, forward: Forward) -> None:
    _no_longer(forward.model)


def _no_longer(model: Model) -> None:
    _Awaited.models.discard(model)
    if not _Awaited.models:
        _let_go()


def _let_go() -> None:
    handle, _Awaited.handle = _Awaited.handle, None
    if handle is not None:
        handle.remove()
        _Awaited.forwards.rest()
