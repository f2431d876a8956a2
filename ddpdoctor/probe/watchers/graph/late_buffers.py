"""Which buffers does a model get after the wrap, or in other shapes (masks, statistics)?

DDP broadcasts the buffers it finds at each forward if the model had any at the wrap, so they must
match on all ranks. Shapes are compared before forwards, digests taken before full steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ....events import LateBuffers, SentBuffers
from ....events.drift import full
from ....events.pack import pack
from ...recording import hooks
from ...recording.devices import hands_off
from ...recording.recorder import Recorder
from ...recording.torch_compat import ignored_by_ddp
from ...recording.watcher import Watcher, on
from ...tensors.digests import sums
from ...tensors.pending_digests import Arrivals, Waiting
from ...training import lifecycle, optimizer_models
from ...training.module_origins import ModuleOrigins
from ...training.records import Forward, Step
from ...training.tracked_model import Model
from ...training.wrapped_models import buffer_of
from .limits import BUFFERS_EMITTED, BUFFERS_FIRST, BUFFERS_OFTEN


class LateBufferWatch(Watcher):
    lost = "buffers that came after the wrap"

    def __init__(self) -> None:
        self.waiting: Arrivals[LateBuffers] = Arrivals()
        self.shapes: WeakKeyDictionary[Model, dict[str, tuple[int, ...]]] = WeakKeyDictionary()

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        model, number = forward.model, forward.model.forwards - 1
        if number >= BUFFERS_FIRST and number & (number - 1) and number % BUFFERS_OFTEN:
            return
        inner = model.inner()
        if inner is None or not forward.wrapper.will_sync_module_buffers():
            return
        ignored = ignored_by_ddp(inner)
        now = {n: b for n, b in inner.named_buffers() if n not in ignored}
        shapes = {n: tuple(b.shape) for n, b in now.items()}
        before = self.shapes.get(model)
        if before is None:
            before = {n: s for n, s in model.buffers.items() if n not in ignored}
        if shapes == before:
            return
        self.shapes[model] = shapes
        new = next((name for name in now if name not in before), None)
        owner = inner.get_submodule(new.rpartition(".")[0]) if new else None
        recorder.emit(
            SentBuffers(
                at=time.monotonic(),
                model=model.number,
                forward=number,
                step=optimizer_models.steps_of(model),
                total=recorder.step,
                site=forward.site,
                buffers=tuple(buffer_of(n, b) for n, b in now.items()),
                made=-1 if owner is None else ModuleOrigins.current.origin_site(owner),
            ),
            vital=True,  # DDP may crash right now
        )

    @on(lifecycle.step_begins, fast_path=False)
    @on(lifecycle.fast_step_due)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        self._write(recorder)
        if not full(step.number) or hands_off():
            return
        for holding in step.holdings:
            found = list(_late_buffers(holding.model))[:BUFFERS_EMITTED]
            if not found:
                continue
            state = LateBuffers(
                at=time.monotonic(),
                model=holding.model.number,
                optimizer=holding.optimizer,
                step=step.number,
                names=tuple(name for name, _ in found),
                shapes=tuple(tuple(int(n) for n in buffer.shape) for _, buffer in found),
                values="",
            )
            self.waiting.add(state, Waiting(sums(buffer for _, buffer in found)[0]))
        self._write(recorder)

    def _write(self, recorder: Recorder) -> None:
        for state, (values,) in self.waiting.take():
            recorder.emit(replace(state, values=pack(values)))

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._write(recorder)


def _late_buffers(model: Model) -> Iterator[tuple[str, Any]]:
    """Late buffers that are persistent and floating-point: counters and caches may differ."""
    inner = model.inner()
    ignored = ignored_by_ddp(inner)
    for path, module in () if inner is None else inner.named_modules():
        for name, buffer in module._buffers.items():
            whole = f"{path}.{name}" if path else name
            if buffer is None or whole in model.buffers or whole in ignored:
                continue
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield whole, buffer
