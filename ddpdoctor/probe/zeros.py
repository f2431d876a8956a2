"""Gradients that are exactly zero, again and again."""

from __future__ import annotations

import time
from typing import Any

from ..events import ZeroGradients
from . import moments
from .digests import readable
from .holdings import Holding
from .moments import Step
from .recorder import Recorder

LOST = "gradients that are always zero"

PARAMETERS_AT_MOST = 2000


class Zeros:
    """Positions whose gradient was zero in all steps looked at so far."""

    def __init__(self) -> None:
        self.always: set[int] | None = None
        self.samples = 0


def install() -> None:
    moments.step_due.subscribe(_step_due, lost=LOST)


def _step_due(active: Recorder, step: Step) -> None:
    number = step.number
    if number & (number - 1):
        return
    known: dict[Holding, Zeros] = step.known.notes.setdefault(Zeros, {})
    for holding in step.holdings:
        zeros = known.setdefault(holding, Zeros())
        if zeros.always == set():
            continue
        found = _look(holding, zeros.always)
        if found is None:
            continue
        zeros.always, zeros.samples = found, zeros.samples + 1
        if found and zeros.samples >= 4:
            optimizer = step.optimizer()
            _tell(active, holding, zeros, number, optimizer)


def _look(holding: Holding, before: set[int] | None) -> set[int] | None:
    """Where the gradients are zero; None where they cannot be read, or a device would have to be
    waited for."""
    positions = holding.synchronised if before is None else sorted(before)
    if len(positions) > PARAMETERS_AT_MOST:
        return set()
    found = set()
    for position, parameter in zip(positions, holding.parameters(positions), strict=True):
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            continue
        if not readable(gradient):
            return None
        if not bool(gradient.any()):
            found.add(position)
    return found


def _tell(active: Recorder, holding: Holding, zeros: Zeros, step: int, optimizer: Any) -> None:
    decay = max((float(g.get("weight_decay") or 0) for g in optimizer.param_groups), default=0.0)
    active.emit(
        ZeroGradients(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            step=step,
            samples=zeros.samples,
            indices=tuple(sorted(zeros.always or ())),
            weight_decay=decay,
        )
    )
