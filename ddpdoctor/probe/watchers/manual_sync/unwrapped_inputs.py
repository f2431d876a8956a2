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
from ...recording.torch_compat import compiled, compiling
from ...recording.watcher import Watcher
from ...recording.weak_references import WeakIdentityMap
from ...tensors.sample_digests import content, latest_batch
from ...training.forwards import Forwards
from ...training.module_origins import ModuleOrigins


class FirstInputs(NamedTuple):
    """The inputs of the first forward since a step; the fields are those of `Averaged`."""

    inputs: int = 0
    numbers: int = 0
    drawn: int = -1
    site: int = -1
    batch: int = 0


class UnwrappedInputs(Watcher):
    lost = "what models without a wrapper were given"

    def __init__(self) -> None:
        self.handle: Any = None
        self.roots: WeakIdentityMap[int] = WeakIdentityMap()
        self.first: dict[int, FirstInputs] = {}
        self.positions: tuple[Position, ...] | None = None

    def install(self) -> None:
        on_restore(self.stop)

    def watch(self, optimizer: int, parameters: list[Any]) -> None:
        """Record the inputs of the next forward of the module that holds these parameters."""
        import torch

        if optimizer not in self.roots.values():
            _, roots = ModuleOrigins.current.named_roots(parameters)
            parts = [m for root in roots[:1] for m in root.modules()]
            scripted = any(isinstance(m, torch.jit.ScriptModule) for m in parts)
            if not parts or scripted or compiling() or compiled(parts):
                return
            self.roots[roots[0]] = optimizer
        self.first.pop(optimizer, None)
        self.positions = rng_state.positions()
        if self.handle is None:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self.handle = register(shielded("given", self._forward_begins, self.lost))

    def pop(self, optimizer: int) -> FirstInputs:
        """The first inputs of an optimizer's model since `watch`; empty ones if none were seen."""
        return self.first.pop(optimizer, FirstInputs())

    def stop(self) -> None:
        """Remove the hook and watch no model any more."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()
        self.roots.clear()

    def _forward_begins(self, module: Any, args: tuple[Any, ...]) -> None:
        optimizer = self.roots.get(module)
        if optimizer is not None and optimizer not in self.first and not Forwards.current.running():
            guarded(
                "given", lambda recorder: self._record(recorder, optimizer, args), lost=self.lost
            )

    def _record(self, recorder: Recorder, optimizer: int, args: tuple[Any, ...]) -> None:
        import torch

        if torch.is_grad_enabled():
            digest, numbers, *_ = content(args)
            before = self.positions
            drawn = rng_state.drawn(before, rng_state.positions()) if before else -1
            self.first[optimizer] = FirstInputs(
                digest, numbers, drawn, recorder.site(), latest_batch.numbers
            )
