"""What becomes of gradients that the program averages by hand: as the last backward left them on
this rank, and as the optimizer applies them. Their mean over the ranks is computed afterwards."""

from __future__ import annotations

import time
from math import isfinite
from typing import Any

from ....events import Averaged
from ....events.operations import operation
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.weak_references import Reference
from ...source.division import divided_by_world_size, loss_divided
from ...source.line_tracer import Tracer
from ...tensors.autograd_nodes import divisor_of
from ...tensors.digests import digests, some_values
from ...training import lifecycle, optimizers, records
from ...training.module_origins import living
from ...training.records import Backward, Step
from . import unwrapped_inputs
from .unwrapped import Loose

LOST = "gradients that are averaged by hand"

LOOKS = 4
"""Steps of an optimizer that are looked at; from the second one on the lines are followed."""

TENSORS = 6
"""Calls that add nothing up and gather nothing."""

NODES = 6
"""How far from the root of the loss to look for a division."""


class _Taken:
    """Of one optimizer: some gradients since the last backward.

    Attributes:
        values: of the gradients of `parameters` when it ended; `alone` as in `Averaged`.
        operations: of the collectives since.
    """

    def __init__(self, parameters: list[Any], tracer: Tracer | None, alone: bool) -> None:
        self.values = some_values([p.grad for p in parameters])
        self.alone = alone
        self.operations: dict[str, None] = {}
        self.tracer = tracer


class _Averaging:
    def __init__(self) -> None:
        self.looks: dict[int, int] = {}
        self.taken: dict[int, _Taken] = {}
        self.loss: tuple[int, str] = (-1, "")
        self.alone: set[int] = set()


_averaging = _Averaging()
_looking = Subscriptions()


def install() -> None:
    _averaging.__init__()  # type: ignore[misc]
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _looking[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, awake=False),
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, awake=False),
        call_hooks.called.subscribe(_called, lost=LOST, awake=False),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),
    )


def _wanted(known: records.Optimizer) -> Loose | None:
    loose = known.notes.get(Loose)
    by_hand = loose is not None and loose.exchanged == "gradients"
    return loose if by_hand and _averaging.looks.get(known.number, 0) < LOOKS else None


def _step_due(recorder: Recorder, step: Step) -> None:
    if _wanted(step.known) is not None:
        _looking.enable()


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    """Whether the loss was divided by the number of ranks on its way here, and by which line."""
    import torch.distributed as dist

    _averaging.loss = -1, ""
    node = getattr(backward.roots[0], "grad_fn", None) if len(backward.roots) == 1 else None
    divided, size = False, dist.get_world_size()
    for _ in range(NODES):
        if node is None:
            break
        divisor = divisor_of(node)
        if abs(divisor * size - 1) < 1e-6:
            return  # multiplied by it, too
        divided |= divisor == size
        ahead = [n for n, _ in node.next_functions if n is not None]
        node = ahead[0] if len(ahead) == 1 else None
    if divided and backward.frame is not None:
        code = backward.frame.f_code
        line, written = loss_divided(code, backward.frame.f_lineno)
        if written:
            _averaging.loss = recorder.sites.number(code, line), written


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    for known in optimizers.known():
        loose = _wanted(known)
        if loose is None:
            continue
        _forget(known.number)
        parameters = _some(loose)
        if parameters and backward.error is None:
            follow = bool(_averaging.looks.get(known.number)) and not _compiled()
            tracer = _trace(recorder, parameters[0]) if follow else None
            alone = known.number in _averaging.alone
            _averaging.taken[known.number] = _Taken(parameters, tracer, alone)


def _some(loose: Loose) -> list[Any]:
    alive = [p for ref in loose.parameters if (p := ref()) is not None and p.grad is not None]
    return alive[:: max(1, len(alive) // TENSORS)][:TENSORS]


def _compiled() -> bool:
    """torch.compile and a trace function do not go together."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in living())


def _trace(recorder: Recorder, parameter: Any) -> Tracer | None:
    reference = Reference(parameter)

    def number() -> int:
        held = reference()
        return digests([None if held is None else held.grad])[0]

    return Tracer.start(recorder, "gradients", number)


def _called(recorder: Recorder, call: Call) -> None:
    kind = operation(call.op)
    if (kind.receives or not kind.spreads) and (
        kind.objects or any(t.is_floating_point() and t.numel() > 1 for t in call.tensors)
    ):
        _averaging.alone.clear()
    for taken in _averaging.taken.values():
        taken.operations[str(call.reduction).rpartition(".")[2]] = None


def _step_begins(recorder: Recorder, step: Step) -> None:
    number = step.known.number
    taken, loose = _averaging.taken.get(number), _wanted(step.known)
    seen = unwrapped_inputs.take(number)
    if loose is not None:
        _averaging.alone.add(number)
        unwrapped_inputs.ask(number, _some(loose))
    if taken is None or loose is None:
        return
    lines = taken.tracer.stop() if taken.tracer is not None else []
    taken.tracer = None
    _forget(number)
    _averaging.looks[number] = _averaging.looks.get(number, 0) + 1
    applied = some_values([p.grad for p in _some(loose)])
    finite = all(map(isfinite, (*applied, *taken.values)))
    whole = finite and len(applied) == len(taken.values) and loose.handed.every
    if whole and not step.closure:
        recorder.emit(
            Averaged(
                at=time.monotonic(),
                optimizer=number,
                step=step.number,
                local=tuple(taken.values),
                applied=tuple(applied),
                operations=tuple(taken.operations),
                sites=tuple(recorder.sites.number(*line) for line in lines),
                divisors=tuple(divided_by_world_size(c.co_filename, n) for c, n in lines),
                loss_site=_averaging.loss[0],
                loss_divisor=_averaging.loss[1],
                alone=taken.alone,
                **seen._asdict(),
            )
        )
    if not any(_wanted(known) for known in optimizers.known()):
        _looking.disable()
        unwrapped_inputs.let_go()


def _forget(number: int) -> None:
    taken = _averaging.taken.pop(number, None)
    if taken is not None and taken.tracer is not None:
        taken.tracer.stop()
