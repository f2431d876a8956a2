"""What the forwards of models without a wrapper are given, in the first few steps.

A hook waits for them only as long as somebody asks.
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


class Given(NamedTuple):
    """The first forward with gradients since a step; as in `Averaged`."""

    inputs: int = 0
    numbers: int = 0
    drawn: int = -1
    site: int = -1


class _Asked:
    handle: Any = None
    roots: WeakIdentityMap[int] = WeakIdentityMap()
    given: dict[int, Given] = {}
    positions: tuple[Position, ...] | None = None


def install() -> None:
    _Asked.roots.clear()
    _Asked.given.clear()
    _Asked.positions = None
    on_restore(let_go)


def ask(optimizer: int, parameters: list[Any]) -> None:
    """Look at the forwards that follow of the module that holds these parameters."""
    import torch

    if optimizer not in _Asked.roots.values():
        _, roots = named_roots(parameters)
        parts = [m for root in roots[:1] for m in root.modules()]
        compiled = compiling() or any(
            hasattr(m, "_orig_mod")
            or getattr(m, "_compiled_call_impl", None)
            or isinstance(m, torch.jit.ScriptModule)
            for m in parts
        )
        if not parts or compiled:
            return  # a hook would have it compiled anew
        _Asked.roots[roots[0]] = optimizer
    _Asked.given.pop(optimizer, None)
    _Asked.positions = rng_state.positions()
    if _Asked.handle is None:
        register = torch.nn.modules.module.register_module_forward_pre_hook
        _Asked.handle = register(shielded("given", _called, LOST))


def take(optimizer: int) -> Given:
    """What the model of an optimizer was given since it was asked for."""
    return _Asked.given.pop(optimizer, Given())


def let_go() -> None:
    handle, _Asked.handle = _Asked.handle, None
    if handle is not None:
        handle.remove()
    _Asked.roots.clear()


def _called(module: Any, args: tuple[Any, ...]) -> None:
    optimizer = _Asked.roots.get(module)
    if optimizer is not None and optimizer not in _Asked.given and not forwards.running():
        guarded("given", lambda recorder: _look(recorder, optimizer, args), lost=LOST)


def _look(recorder: Recorder, optimizer: int, args: tuple[Any, ...]) -> None:
    import torch

    if torch.is_grad_enabled():
        digest, numbers = content(args)
        before = _Asked.positions
        drawn = rng_state.drawn(before, rng_state.positions()) if before else -1
        _Asked.given[optimizer] = Given(digest, numbers, drawn, recorder.site())
