"""Collectives that the program itself makes on gradients that DDP has averaged."""

from __future__ import annotations

import time
from typing import Any

from ....events import GradientReduced
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.recorder import Recorder
from ...tensors.gradient_versions import memory_of
from ...training import backwards, wrapped_models
from ...training.tracked_model import Model
from . import gradient_sync, manual_edits

LOST = "collectives on gradients"

LOOKED_AT = 6
"""Steps of a line in which what it makes of the gradients is looked at, whatever that costs."""

EMITTED = 20
"""Steps of a line that are told of one by one, later ones each time their number doubles."""

OWN, COPY = "own", "copy"
"""What a collective is made on: gradients themselves, or copies of them."""


class _Summed:
    """
    Attributes:
        latest: by site, the last step in which it made one, told or `untold`.
    """

    def __init__(self) -> None:
        self.sizes: dict[Model, frozenset[int]] = {}
        self.latest: dict[int, GradientReduced] = {}
        self.untold: dict[int, GradientReduced] = {}


_summed = _Summed()


def install() -> None:
    _summed.__init__()  # type: ignore[misc]
    call_hooks.called.subscribe(_called, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)


def _called(recorder: Recorder, call: Call) -> None:
    """A collective that the program itself makes on gradients that DDP has averaged."""
    if call.reduction is None or not call.tensors or backwards.running():
        return
    for model in wrapped_models.live():
        if not gradient_sync.averaged(model):
            continue
        found = {kind for t in call.tensors if (kind := _is_gradient(model, t))}
        if found:
            operation = str(call.reduction).rpartition(".")[2]
            _emit_reduced(recorder, model, operation, copied=found == {COPY})
            return


def _sizes(model: Model) -> frozenset[int]:
    """Numbers of elements of the parameters that DDP averages, and of all of them."""
    found = _summed.sizes.get(model)
    if found is None:
        held = (model.parameters[position]() for position in model.expected)
        sizes = [p.numel() for p in held if p is not None]
        found = _summed.sizes[model] = frozenset([*sizes, sum(sizes)])
    return found


def _emit_reduced(recorder: Recorder, model: Model, operation: str, *, copied: bool) -> None:
    site = recorder.site()
    last = _summed.latest.get(site)
    if last is not None and last.step == recorder.step:
        return
    number = last.call + 1 if last is not None else 0
    if number < LOOKED_AT:
        manual_edits.look_now(model)  # by what this multiplies them
    event = _summed.latest[site] = GradientReduced(
        at=time.monotonic(),
        model=model.number,
        op=operation,
        step=recorder.step,
        site=site,
        call=number,
        copied=copied,
    )
    if number < EMITTED or number & (number - 1) == 0:
        recorder.emit(event)
        _summed.untold.pop(site, None)
    else:
        _summed.untold[site] = event


def _leaving(recorder: Recorder, _: None) -> None:
    """In how many steps they were made."""
    for event in _summed.untold.values():
        recorder.emit(event)
    _summed.untold.clear()


def _is_gradient(model: Model, tensor: Any) -> str:
    """Whether a tensor shares memory with one of the gradients, or holds a copy: of one of them, or
    of all in a row."""
    try:
        storage = tensor.untyped_storage()
        wanted = storage.data_ptr()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return ""
    if whole and tensor.numel() not in _sizes(model):
        return ""  # most often: a loss or a count
    held = (model.parameters[position]() for position in model.expected)
    grads = [p.grad for p in held if p is not None and p.grad is not None]
    if any(g is tensor or memory_of(g) == wanted for g in grads):
        return OWN
    return COPY if whole and _copied(tensor, grads) else ""


def _copied(tensor: Any, grads: list[Any]) -> bool:
    """Whether a tensor begins as a gradient does and ends as one does; nothing is read from a
    device, and zeros prove nothing."""
    import torch

    if not tensor.is_cpu or not tensor.is_floating_point() or type(tensor) is not torch.Tensor:
        return False
    same = [g for g in grads if type(g) is torch.Tensor and g.is_cpu and g.dtype == tensor.dtype]
    whole = [g.detach().reshape(-1) for g in same if g.is_contiguous() and g.numel()]
    values = tensor.detach().reshape(-1)
    first, last = float(values[0]), float(values[-1])
    return bool(first and last) and all(
        any(float(g[place]) == value for g in whole) for place, value in ((0, first), (-1, last))
    )
