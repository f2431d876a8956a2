"""What the program calls its wrapped models where it trains them."""

from __future__ import annotations

import sys
import time

from ....events import Named
from ...recording.names_in_frames import name_of
from ...recording.recorder import Recorder
from ...training import lifecycle, wrapped_models
from ...training.records import Step
from ...training.tracked_model import Model

LOST = "the names of models"

_named: set[Model] = set()


def install() -> None:
    _named.clear()
    lifecycle.step_due.subscribe(_step_due, routine=False, lost=LOST)


def _step_due(recorder: Recorder, step: Step) -> None:
    """Before the first step of an optimizer, when models and optimizers are made."""
    if step.number:
        return
    for model in wrapped_models.live():
        wrapper = model.ddp()
        if wrapper is None or model in _named:
            continue
        _named.add(model)
        if one := name_of(id(wrapper), sys._getframe(1), recorder.sites):
            recorder.emit(Named(at=time.monotonic(), model=model.number, name=one.name))
