"""Which GPUs does this rank use, and on which others does it leave a CUDA context?

Looked at when models are wrapped, before the first steps and after `torch.load`; never before the
program itself initialises CUDA.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ....events import DeviceTouched, DeviceUsed
from ...recording import torch_compat
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...training import lifecycle
from ...training.records import Step
from ...training.tracked_model import Model

LOST = "which GPUs the ranks use"

LOOKS = 4
"""Steps before which contexts are searched for: stray ones are made during setup."""


class _Devices:
    def __init__(self) -> None:
        self.used: dict[int, str] = {}
        self.touched: set[int] = set()
        self.steps = 0


_devices = _Devices()


def install() -> None:
    import torch
    import torch.serialization

    _devices.__init__()  # type: ignore[misc]
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    around((torch.serialization, torch), "load", after=_loaded, lost=LOST)


def _ready() -> bool:
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized())


def _emit_used(recorder: Recorder, index: int, why: str) -> None:
    if index in _devices.used:
        return
    uuid, name = _identity(index)
    _devices.used[index] = uuid
    recorder.emit(
        DeviceUsed(
            at=time.monotonic(), index=index, uuid=uuid, name=name, site=recorder.site(), why=why
        )
    )


def _identity(index: int) -> tuple[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return uuid, str(properties.name)


def _wrapped(recorder: Recorder, model: Model) -> None:
    _note_parameters(recorder, model.live_parameters() or [])
    _find_contexts(recorder, "before the model was wrapped")


def _step_due(recorder: Recorder, step: Step) -> None:
    if _devices.steps >= LOOKS or not _ready():
        return
    _devices.steps += 1
    optimizer = step.optimizer()
    groups = optimizer.param_groups if optimizer is not None else ()
    _note_parameters(recorder, [p for group in groups for p in group["params"]])
    _find_contexts(recorder, "before a step")


def _note_parameters(recorder: Recorder, parameters: list[Any]) -> None:
    if not _ready():
        return
    import torch

    for index in {p.device.index for p in parameters if p.device.type == "cuda"}:
        _emit_used(recorder, index, "parameters")
    chosen = torch.cuda.current_device()
    if chosen:  # 0 is the default, so it does not show a choice
        _emit_used(recorder, chosen, "set_device")


def _loaded(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _find_contexts(recorder, "torch.load")


def _find_contexts(recorder: Recorder, by: str) -> None:
    """Record contexts on devices that this rank neither holds parameters on nor selected."""
    if not _ready():
        return
    import torch

    for index in range(torch.cuda.device_count()):
        if index in _devices.touched or index in _devices.used:
            continue
        if torch_compat.has_context(index):
            _devices.touched.add(index)
            recorder.emit(
                DeviceTouched(
                    at=time.monotonic(),
                    index=index,
                    uuid=_identity(index)[0],
                    site=recorder.site(),
                    by=by,
                )
            )
