"""Parameters that are trained without a wrapper: what they are, whether ranks agree on them."""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from ..events import Unwrapped, UnwrappedState
from . import exchanges, models, moments, optimizers
from .digests import sums
from .drift import Waiting
from .models import tensor_of
from .modules import birth_site, named_roots
from .moments import Step
from .recorder import Recorder
from .resolving import assignment_in_frames

LOST = "models that are trained without a wrapper"

LOOK_AGAIN = 32
TOLD_AT_MOST = 5000
"""Parameters of one optimizer that are listed."""


class Loose:
    """What is known of one optimizer.

    Attributes:
        parameters: those that no wrapper was given.
        exchanged: by what means they were ever exchanged, empty where they never were.
        waiting: digests on their way from a device.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = [weakref.ref(p) for p in parameters]
        self.held = 0
        self.models = 0
        self.exchanged = ""
        self.waiting: list[tuple[int, str, Waiting, Waiting]] = []


def install() -> None:
    moments.step_begins.subscribe(_step_begins, lost=LOST)
    moments.leaving.subscribe(_leaving, lost=LOST)


def _step_begins(active: Recorder, step: Step) -> None:
    known = step.known.notes.get(Loose)
    # What a wrapper covers stays covered: look again only now and then.
    if known is not None and not known.parameters and step.number % LOOK_AGAIN:
        return
    optimizer = step.optimizer()
    if optimizer is None or not _several_ranks():
        return
    known = _known(active, optimizer, step)
    if not known.parameters:
        return
    alive = [p for ref in known.parameters if (p := ref()) is not None]
    before, known.exchanged = known.exchanged, known.exchanged or _exchanged(alive)
    _write(active, step.known.number, known, wait=False)
    number = step.number
    due = number & (number - 1) == 0 or known.exchanged != before
    if due and any(p.grad is not None for p in alive):
        values, _ = sums(alive)
        gradients, _ = sums(p.grad for p in alive)
        row = (number, known.exchanged, Waiting(gradients), Waiting(values))
        known.waiting.append(row)
        _write(active, step.known.number, known, wait=False)


def _several_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _known(active: Recorder, optimizer: Any, step: Step) -> Loose:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    known = step.known.notes.get(Loose)
    if known is not None and (known.held, known.models) == (held, models.count()):
        return known
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    covered = models.covered()
    mine = [p for p in parameters if _floating(p) and id(p) not in covered]
    if any(_sharded(p) for p in parameters):
        mine = []
    known = step.known.notes[Loose] = Loose(mine)
    known.held, known.models = held, models.count()
    if mine:
        _tell(active, step, mine)
    return known


def _floating(parameter: Any) -> bool:
    return bool(parameter.requires_grad and parameter.is_floating_point())


def _sharded(parameter: Any) -> bool:
    """FSDP of both kinds and tensor parallelism hold a piece of each parameter per rank."""
    return (
        hasattr(parameter, "device_mesh")
        or hasattr(parameter, "_fsdp_flattened")
        or type(parameter).__name__ == "FlatParameter"
    )


def _made_at(active: Recorder, root: Any) -> int:
    """The line that named the model, where it is still in sight; else the one that made it."""
    found = assignment_in_frames(
        sys._getframe(1), lambda code: active.sites.kind(code) == "user", root
    )
    if found is not None:
        return active.sites.number(found.code, found.line)
    return birth_site(root) if hasattr(root, "_modules") else -1


def _tell(active: Recorder, step: Step, parameters: list[Any]) -> None:
    names, roots = named_roots(parameters)
    active.emit(
        Unwrapped(
            at=time.monotonic(),
            optimizer=step.known.number,
            kind=type(roots[0]).__name__ if roots else "",
            parameters=tuple(
                tensor_of(names.get(id(p), f"parameter {i}"), p)
                for i, p in enumerate(parameters[:TOLD_AT_MOST])
            ),
            wrapped=models.count(),
            site=_made_at(active, roots[0] if roots else parameters[0]),
            step_site=step.site,
        ),
        vital=True,
    )


def _exchanged(parameters: list[Any]) -> str:
    """How the ranks exchanged these parameters or their gradients since the last step."""
    if found := exchanges.special():
        return found
    if exchanges.gradients_exchanged(parameters):
        return "gradients" if exchanges.gradient_groups() == {0} else "gradients of a group"
    if exchanges.values_exchanged(parameters):
        return "parameters"
    return "unseen" if not models.live() and exchanges.unseen() else ""


def _write(active: Recorder, optimizer: int, known: Loose, *, wait: bool) -> None:
    while known.waiting:
        number, exchanged, gradients, values = known.waiting[0]
        if not (gradients.ready(wait=wait) and values.ready(wait=wait)):
            return
        known.waiting.pop(0)
        active.emit(
            UnwrappedState(
                at=time.monotonic(),
                optimizer=optimizer,
                step=number,
                gradients=_one(gradients.values),
                parameters=_one(values.values),
                exchanged=exchanged,
            ),
            vital=True,
        )


def _one(numbers: list[int]) -> int:
    total = 0
    for place, number in enumerate(numbers, 1):
        total = (total + place * number) & 0x7FFFFFFFFFFF
    return total


def _leaving(active: Recorder, _: None) -> None:
    for known in optimizers.known():
        if loose := known.notes.get(Loose):
            loose.waiting.clear()
