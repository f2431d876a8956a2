"""Which variable names does the program use for its wrapped models?

The running functions are searched once per model, before the first step of an optimizer.
"""

from __future__ import annotations

import sys
import time

from ....events import Named
from ...recording.names_in_frames import name_of
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Step
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels


class ModelNames(Watcher):
    lost = "the names of models"

    def __init__(self) -> None:
        self._named: set[Model] = set()

    @on(lifecycle.step_due, fast_path=False)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        """Name new models before the first step of an optimizer: by then all of them exist."""
        if step.number:
            return
        for model in WrappedModels.current.live():
            wrapper = model.ddp()
            if wrapper is None or model in self._named:
                continue
            self._named.add(model)
            if one := name_of(id(wrapper), sys._getframe(1), recorder.sites):
                recorder.emit(Named(at=time.monotonic(), model=model.number, name=one.name))
