"""Does the program all-reduce gradients that DDP has already averaged?

Every reducing call between a backward and a step is compared with the gradients, by memory, size
and a few values.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import GradientReduced
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...tensors.collective_payload import memory_of
from ...training.backwards import Backwards
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from .gradient_sync import GradientSync
from .limits import CALLS_LOOKED_AT, REDUCTIONS_EMITTED
from .manual_edits import ManualEdits

OWN, COPY = "own", "copy"
"""A collective got the gradients themselves, or copies of them."""


class SecondReduction(Watcher):
    """
    Attributes:
        sizes: by model, see `_sizes`.
        latest: by site, its last call.
        unrecorded: those of `latest` that are not on record.
    """

    lost = "collectives on gradients"

    def __init__(self) -> None:
        self.sizes: dict[Model, frozenset[int]] = {}
        self.latest: dict[int, GradientReduced] = {}
        self.unrecorded: dict[int, GradientReduced] = {}

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        """Record a call if it reduces gradients that DDP has averaged in this backward."""
        if call.reduction is None or not call.tensors or Backwards.current.running():
            return
        for model in WrappedModels.current.live():
            if not GradientSync.current.averaged(model):
                continue
            found = {kind for t in call.tensors if (kind := self._match_gradient(model, t))}
            if found:
                operation = call.reduces_by
                self._emit_reduced(recorder, model, operation, copied=found == {COPY})
                return

    def _sizes(self, model: Model) -> frozenset[int]:
        """Sizes a copy of gradients can have: of each parameter that DDP averages, and of all in
        one flat buffer."""
        found = self.sizes.get(model)
        if found is None:
            held = (model.parameters[position]() for position in model.expected)
            sizes = [p.numel() for p in held if p is not None]
            found = self.sizes[model] = frozenset([*sizes, sum(sizes)])
        return found

    def _emit_reduced(
        self, recorder: Recorder, model: Model, operation: str, *, copied: bool
    ) -> None:
        site = recorder.site()
        last = self.latest.get(site)
        if last is not None and last.step == recorder.step:
            return
        number = last.call + 1 if last is not None else 0
        if number < CALLS_LOOKED_AT:
            ManualEdits.current.look_now(
                model
            )  # measures the factor by which the call changes them
        event = self.latest[site] = GradientReduced(
            at=time.monotonic(),
            model=model.number,
            op=operation,
            step=recorder.step,
            site=site,
            call=number,
            copied=copied,
        )
        if number < REDUCTIONS_EMITTED or number & (number - 1) == 0:
            recorder.emit(event)
            self.unrecorded.pop(site, None)
        else:
            self.unrecorded[site] = event

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        """Record each line's last call: its number says in how many steps there was one."""
        for event in self.unrecorded.values():
            recorder.emit(event)
        self.unrecorded.clear()

    def _match_gradient(self, model: Model, tensor: Any) -> str:
        """`OWN` if a tensor shares memory with a gradient, `COPY` if it holds a copy of one or of
        all in a row, else empty."""
        try:
            storage = tensor.untyped_storage()
            wanted = storage.data_ptr()
            whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        except (RuntimeError, NotImplementedError):
            return ""
        if whole and tensor.numel() not in self._sizes(model):
            return ""  # the quick way out for losses and counts, which most calls carry
        held = (model.parameters[position]() for position in model.expected)
        grads = [p.grad for p in held if p is not None and p.grad is not None]
        if any(g is tensor or memory_of(g) == wanted for g in grads):
            return OWN
        return COPY if whole and _copied(tensor, grads) else ""


def _copied(tensor: Any, grads: list[Any]) -> bool:
    """Whether the first and last value of a tensor are those of gradients.

    False for tensors on a device, which it would have to wait for, and for zeros, which prove
    nothing.
    """
    import torch

    if not tensor.is_cpu or not tensor.is_floating_point() or type(tensor) is not torch.Tensor:
        return False
    same = [g for g in grads if type(g) is torch.Tensor and g.is_cpu and g.dtype == tensor.dtype]
    whole = [g.detach().reshape(-1) for g in same if g.is_contiguous() and g.numel()]
    values = tensor.detach().reshape(-1)
    first, last = float(values[0]), float(values[-1])
    return bool(first and last) and all(
        any(float(g[place]) == value for g in whole) for place, value in ((0, first), (-1, last))
    )
