"""Which parameters does a flat tensor of gradients leave out, because they have none?"""

from __future__ import annotations

import time

from ....events import FlatGradients as Recorded
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...training.backwards import Backwards
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from .limits import FLAT_NAMES, FLAT_SIZES


class FlatGradients(Watcher):
    """
    Attributes:
        sizes: the numbers of elements of the tensors looked at.
    """

    lost = "parameters that flat tensors of gradients leave out"

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        if call.reduction is None or len(call.tensors) != 1:
            return
        (tensor,) = call.tensors
        numel = tensor.numel()
        if numel in self.sizes or tensor.dim() != 1 or not tensor.is_floating_point():
            return
        if len(self.sizes) >= FLAT_SIZES or not Backwards.current.since(recorder.step):
            return
        self.sizes.add(numel)
        every = [p for p in Optimizers.current.parameters().values() if p.requires_grad]
        missing = [p for p in every if p.grad is None]
        held = sum(p.grad.numel() for p in every if p.grad is not None)
        if not missing or held != numel:
            return
        names, _ = ModuleOrigins.current.named_roots(missing)
        recorder.emit(
            Recorded(
                at=time.monotonic(),
                numel=numel,
                whole=sum(p.numel() for p in every),
                missing=tuple(names.get(id(p), "") for p in missing[:FLAT_NAMES]),
                step=recorder.step,
                site=recorder.site(),
            ),
            vital=True,
        )
