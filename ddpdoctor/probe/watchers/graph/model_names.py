"""Which variable names does the program use for its wrapped models?

The running functions are searched once per model, before the first step of an optimizer.
"""

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
    lifecycle.step_due.subscribe(_step_due, fast_path=False, lost=LOST)


def _step_due(recorder: Recorder, step: Step) -> None:
    """Name new models before the first step of an optimizer: by then all of them exist."""
    if step.number:
        return
    for model in wrapped_models.live():
        wrapper = model.ddp()
        if wrapper is None or model in _named:
            continue
        _named.add(model)
        if one := name_of(id(wrapper), sys._getframe(1), recorder.sites):
            recorder.emit(Named(at=time.monotonic(), model=model.number, name=one.name))
