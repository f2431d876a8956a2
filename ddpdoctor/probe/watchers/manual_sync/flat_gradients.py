"""Which flat tensors hold gradients, and which parameters do they leave out that have none?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....events import FlatGradients as Recorded
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...tensors.digests import readable
from ...tensors.flat_layout import PACKED, flat_layout
from ...training.backwards import Backwards
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from .limits import FLAT_LOOKS, FLAT_NAMES, FLAT_SIZES


class FlatGradients(Watcher):
    """
    Attributes:
        looks: by the number of elements of a tensor, how often it was looked at.
        layouts: by the number of elements, how such a tensor holds gradients (`flat_layout`), once
            that is known.
        recorded: the numbers of elements of which it is recorded what they leave out.
    """

    lost = "parameters that flat tensors of gradients leave out"

    def __init__(self) -> None:
        self.looks: Counter[int] = Counter()
        self.layouts: dict[int, str] = {}
        self.recorded: set[int] = set()

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        if call.reduction is None or len(call.tensors) != 1:
            return
        (tensor,) = call.tensors
        numel = tensor.numel()
        if numel in self.layouts or tensor.dim() != 1 or not tensor.is_floating_point():
            return
        if self.looks[numel] >= FLAT_LOOKS or not Backwards.current.since(recorder.step):
            return
        if numel not in self.looks and len(self.looks) >= FLAT_SIZES:
            return
        self.looks[numel] += 1
        every = [p for p in Optimizers.current.parameters().values() if p.requires_grad]
        missing = [p for p in every if p.grad is None]
        held = sum(p.grad.numel() for p in every if p.grad is not None)
        whole = sum(p.numel() for p in every)
        if not missing or not held <= numel:
            return
        gradients = [p.grad for p in every if p.grad is not None]
        # To read another device would wait for it, and shards (DTensors) are laid out otherwise.
        if all(map(readable, (tensor, *gradients))):
            layouts = (flat_layout(tensor, order) for order in _orders(every))
            if found := next((layout for layout in layouts if layout), ""):
                self.layouts[numel] = found
        if numel in self.recorded or (held != numel and self.layouts.get(numel) != PACKED):
            return
        self.recorded.add(numel)
        names, _ = ModuleOrigins.current.named_roots(missing)
        recorder.emit(
            Recorded(
                at=time.monotonic(),
                numel=numel,
                whole=whole,
                missing=tuple(names.get(id(p), "") for p in missing[:FLAT_NAMES]),
                step=recorder.step,
                site=recorder.site(),
            ),
            vital=True,
        )


def _orders(parameters: list[Any]) -> Iterator[list[Any]]:
    """The orders in which a program goes through parameters: of the optimizers, of the model."""
    yield parameters
    _, roots = ModuleOrigins.current.named_roots(parameters)
    mine = {id(p) for p in parameters}
    if len(roots) == 1:
        yield [p for p in roots[0].parameters() if id(p) in mine]
