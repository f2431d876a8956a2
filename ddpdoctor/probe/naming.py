"""What the program calls its wrapped models where it trains them."""

from __future__ import annotations

import sys
import time

from ..events import Named
from . import models, moments
from .holders import name_of
from .models import Model
from .moments import Step
from .recorder import Recorder

LOST = "the names of models"

_named: set[Model] = set()


def install() -> None:
    _named.clear()
    moments.step_due.subscribe(_step_due, routine=False, lost=LOST)


def _step_due(active: Recorder, step: Step) -> None:
    """Before the first step of an optimizer, when models and optimizers are made."""
    if step.number:
        return
    for model in models.live():
        wrapper = model.ddp()
        if wrapper is None or model in _named:
            continue
        _named.add(model)
        if one := name_of(id(wrapper), sys._getframe(1), active.sites):
            active.emit(Named(at=time.monotonic(), model=model.number, name=one.name))
