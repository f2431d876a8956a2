"""Evaluations that call the model inside of the wrapper: no forward of the wrapper tells of them.

`eval()` is called rarely. Only from there to the next forward of the model a hook waits for it.
"""

from __future__ import annotations

from typing import Any

from . import drift, forwards, models, moments
from .models import Model
from .moments import Forward, Subscriptions
from .patching import around, on_restore
from .recorder import Recorder, guarded, shielded
from .torch_private import compiling

LOST = "drift at evaluation around the wrapper"


class _Awaited:
    handle: Any = None
    models: set[Model] = set()
    forwards = Subscriptions()


def install() -> None:
    import torch.nn

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
        drift.evaluation_begins(model)
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
        guarded("evaluation", lambda active: _evaluated(active, model), lost=LOST)


def _evaluated(active: Recorder, model: Model) -> None:
    import torch

    if not torch.is_grad_enabled():
        _no_longer(model)
        drift.evaluated(active, model, active.site())


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
