"""Which GPUs does this rank use, and on which others does it leave a CUDA context?

Looked at when models are wrapped, before the first steps and after `torch.load`; never before the
program itself initialises CUDA.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ....events import DeviceTouched, DeviceUsed
from ...recording import devices, torch_compat
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.records import Step
from ...training.tracked_model import Model
from .limits import DEVICE_LOOKS


class DevicesUsed(Watcher):
    lost = "which GPUs the ranks use"

    def __init__(self) -> None:
        self.used: dict[int, str] = {}
        self.touched: set[int] = set()
        self.steps = 0

    def install(self) -> None:
        import torch
        import torch.serialization
        from torch.nn.parallel import DistributedDataParallel

        # NCCL refuses a GPU that two ranks use in the constructor, so it is noted before that.
        self.around(DistributedDataParallel, "__init__", before=self._wraps)
        self.around((torch.serialization, torch), "load", after=self._loaded)

    def _emit_used(self, recorder: Recorder, index: int, why: str) -> None:
        if index in self.used:
            return
        uuid, name = _identity(index)
        self.used[index] = uuid
        recorder.emit(
            DeviceUsed(
                at=time.monotonic(),
                index=index,
                uuid=uuid,
                name=name,
                site=recorder.site(),
                why=why,
            )
        )

    def _name_unread(self, recorder: Recorder, parameters: list[Any]) -> None:
        """Say which checks do not see what lies on devices."""
        for device in {p.device for p in parameters if p.device.type not in ("cpu", "meta")}:
            if not devices.readable_later(device):
                reason = f"values on {device.type} devices cannot be read without waiting for them"
                for check in devices.WITHOUT_EVENTS:
                    recorder.not_observed(check, reason)
            for check, reason in devices.UNREAD.items():
                recorder.not_observed(check, reason)
            for check, reason in devices.UNREAD_PARTLY.items():
                recorder.not_observed(check, reason, partly=True)

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        self._note_parameters(recorder, model.live_parameters() or [])
        self._find_contexts(recorder, "before the model was wrapped")

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        if self.steps >= DEVICE_LOOKS:
            return
        optimizer = step.optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        held = [p for group in groups for p in group["params"]]
        if not _ready() and all(p.is_cpu for p in held[:1]):
            return
        self.steps += 1
        self._note_parameters(recorder, held)
        self._find_contexts(recorder, "before a step")

    def _note_parameters(self, recorder: Recorder, parameters: list[Any]) -> None:
        self._name_unread(recorder, parameters)
        if not _ready():
            return
        import torch

        for index in {p.device.index for p in parameters if p.device.type == "cuda"}:
            self._emit_used(recorder, index, "parameters")
        chosen = torch.cuda.current_device()
        if chosen:  # 0 is the default, so it does not show a choice
            self._emit_used(recorder, chosen, "set_device")

    def _wraps(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        module = kwargs.get("module", args[1] if len(args) > 1 else None)
        self._note_parameters(recorder, [] if module is None else [*module.parameters()])

    def _loaded(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        self._find_contexts(recorder, "torch.load")

    def _find_contexts(self, recorder: Recorder, by: str) -> None:
        """Record contexts on devices that this rank neither holds parameters on nor selected."""
        if not _ready():
            return
        import torch

        for index in range(torch.cuda.device_count()):
            if index in self.touched or index in self.used:
                continue
            if torch_compat.has_context(index):
                self.touched.add(index)
                recorder.emit(
                    DeviceTouched(
                        at=time.monotonic(),
                        index=index,
                        uuid=_identity(index)[0],
                        site=recorder.site(),
                        by=by,
                    )
                )


def _ready() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized())


def _identity(index: int) -> tuple[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return uuid, str(properties.name)
