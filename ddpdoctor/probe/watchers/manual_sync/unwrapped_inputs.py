"""What inputs do models without a wrapper get in the first steps?

A global forward hook is registered only while `averaged_gradients` watches such a model: it would
slow down every module otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...recording import rng_state
from ...recording.patching import on_restore
from ...recording.recorder import Recorder, guarded, shielded
from ...recording.rng_state import Position
from ...recording.torch_compat import compiling
from ...recording.weak_references import WeakIdentityMap
from ...tensors.sample_digests import content
from ...training import forwards
from ...training.module_origins import named_roots

LOST = "what models without a wrapper were given"


class FirstInputs(NamedTuple):
    """The inputs of the first forward since a step; the fields are those of `Averaged`."""

    inputs: int = 0
    numbers: int = 0
    drawn: int = -1
    site: int = -1


class _Inputs:
    handle: Any = None
    roots: WeakIdentityMap[int] = WeakIdentityMap()
    first: dict[int, FirstInputs] = {}
    positions: tuple[Position, ...] | None = None


def install() -> None:
    _Inputs.roots.clear()
    _Inputs.first.clear()
    _Inputs.positions = None
    on_restore(stop)


def watch(optimizer: int, parameters: list[Any]) -> None:
    """Record the inputs of the next forward of the module that holds these parameters."""
    import torch

    if optimizer not in _Inputs.roots.values():
        _, roots = named_roots(parameters)
        parts = [m for root in roots[:1] for m in root.modules()]
        compiled = compiling() or any(
            hasattr(m, "_orig_mod")
            or getattr(m, "_compiled_call_impl", None)
            or isinstance(m, torch.jit.ScriptModule)
            for m in parts
        )
        if not parts or compiled:
            return  # a global hook would make torch.compile compile it again
        _Inputs.roots[roots[0]] = optimizer
    _Inputs.first.pop(optimizer, None)
    _Inputs.positions = rng_state.positions()
    if _Inputs.handle is None:
        register = torch.nn.modules.module.register_module_forward_pre_hook
        _Inputs.handle = register(shielded("given", _forward_begins, LOST))


def pop(optimizer: int) -> FirstInputs:
    """The first inputs of an optimizer's model since `watch`; empty ones if none were seen."""
    return _Inputs.first.pop(optimizer, FirstInputs())


def stop() -> None:
    """Remove the hook and watch no model any more."""
    handle, _Inputs.handle = _Inputs.handle, None
    if handle is not None:
        handle.remove()
    _Inputs.roots.clear()


def _forward_begins(module: Any, args: tuple[Any, ...]) -> None:
    optimizer = _Inputs.roots.get(module)
    if optimizer is not None and optimizer not in _Inputs.first and not forwards.running():
        guarded("given", lambda recorder: _record(recorder, optimizer, args), lost=LOST)


def _record(recorder: Recorder, optimizer: int, args: tuple[Any, ...]) -> None:
    import torch

    if torch.is_grad_enabled():
        digest, numbers = content(args)
        before = _Inputs.positions
        drawn = rng_state.drawn(before, rng_state.positions()) if before else -1
        _Inputs.first[optimizer] = FirstInputs(digest, numbers, drawn, recorder.site())
