"""Which GPUs this rank uses, and on which others it leaves a context. Nothing without GPUs."""

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
"""Steps at which contexts are looked for; later ones come from elsewhere than the start."""


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


def _use(recorder: Recorder, index: int, why: str) -> None:
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
    _look(recorder, "before the model was wrapped")


def _step_due(recorder: Recorder, step: Step) -> None:
    if _devices.steps >= LOOKS or not _ready():
        return
    _devices.steps += 1
    optimizer = step.optimizer()
    groups = optimizer.param_groups if optimizer is not None else ()
    _note_parameters(recorder, [p for group in groups for p in group["params"]])
    _look(recorder, "before a step")


def _note_parameters(recorder: Recorder, parameters: list[Any]) -> None:
    if not _ready():
        return
    import torch

    for index in {p.device.index for p in parameters if p.device.type == "cuda"}:
        _use(recorder, index, "parameters")
    chosen = torch.cuda.current_device()
    if chosen:  # 0 is also what it is where nobody has chosen
        _use(recorder, chosen, "set_device")


def _loaded(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _look(recorder, "torch.load")


def _look(recorder: Recorder, by: str) -> None:
    """Contexts that exist by now on devices that nobody told this rank to use."""
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
