"""Gradients that are exactly zero, again and again, of parameters that the optimizer changes."""

from __future__ import annotations

import time

from ....events import ZeroGradients
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...tensors.digests import ABSENT, digests, readable
from ...training import lifecycle, optimizers
from ...training.records import OptimizerModel, Step

LOST = "gradients that are always zero"

PARAMETERS_AT_MOST = 2000

SAMPLES = 4
"""Looks that must agree; from then on every step that is due is looked at."""


class Zeros:
    """Of one holding: positions whose gradient was zero in all steps looked at so far.

    Attributes:
        changed: those that a step changed all the same; told: those on record.
        alive: those whose gradient was not zero when all were looked at.
        before: digests of the parameters before the step that is being taken.
    """

    def __init__(self) -> None:
        self.always: set[int] | None = None
        self.alive: set[int] = set()
        self.changed: set[int] = set()
        self.emitted: set[int] = set()
        self.samples = 0
        self.before: dict[int, int] = {}


_ends = Subscriptions()


def install() -> None:
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)
    _ends[:] = (lifecycle.step_ends.subscribe(_step_ends, lost=LOST, awake=False),)


def _step_due(recorder: Recorder, step: Step) -> None:
    rare = not step.number & (step.number - 1)
    known: dict[OptimizerModel, Zeros] = step.known.notes.setdefault(Zeros, {})
    for holding in step.holdings:
        zeros = known.setdefault(holding, Zeros())
        if zeros.always == set() or not (rare or zeros.samples >= SAMPLES):
            continue
        seen = _look(holding, zeros.always)
        if seen is None:
            continue
        if zeros.always is None:
            zeros.alive = {position for position, zero in seen.items() if not zero}
        zeros.always = {position for position, zero in seen.items() if zero}
        zeros.samples += 1
        if zeros.emitted - zeros.always:
            _emit(recorder, holding, zeros, step)
        if rare and zeros.always:
            zeros.before = _digests(holding, sorted(zeros.always))
            _ends.enable()


def _step_ends(recorder: Recorder, step: Step) -> None:
    """Which of them the optimizer changed."""
    known: dict[OptimizerModel, Zeros] = step.known.notes.get(Zeros, {})
    for holding, zeros in known.items():
        before, zeros.before = zeros.before, {}
        after = _digests(holding, list(before))
        zeros.changed |= {p for p, old in before.items() if ABSENT != old != after[p] != ABSENT}
        if before and zeros.samples >= SAMPLES:
            _emit(recorder, holding, zeros, step)
    _ends.enable(any(z.before for k in optimizers.known() for z in k.notes.get(Zeros, {}).values()))


def _leaving(recorder: Recorder, _: None) -> None:
    """What the last backward left may say otherwise."""
    for known in optimizers.known():
        for holding, zeros in known.notes.get(Zeros, {}).items():
            seen = _look(holding, zeros.emitted) or {}
            ended = {position for position, zero in seen.items() if not zero}
            if ended and zeros.always and known.step is not None:
                zeros.always -= ended
                _emit(recorder, holding, zeros, known.step)


def _look(holding: OptimizerModel, before: set[int] | None) -> dict[int, bool] | None:
    """Whether the gradients that exist are zero, by position; None where they cannot be read, or a
    device would have to be waited for."""
    positions = holding.synchronised if before is None else sorted(before)
    if len(positions) > PARAMETERS_AT_MOST:
        return {}
    seen = {}
    for position, parameter in zip(positions, holding.parameters(positions), strict=True):
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            continue
        if not readable(gradient):
            return None
        seen[position] = not bool(gradient.any())
    return seen


def _digests(holding: OptimizerModel, positions: list[int]) -> dict[int, int]:
    return dict(zip(positions, digests(holding.parameters(positions)), strict=True))


def _emit(recorder: Recorder, holding: OptimizerModel, zeros: Zeros, step: Step) -> None:
    now = zeros.changed & (zeros.always or set())
    if not now and not zeros.emitted:
        return
    zeros.emitted = now
    optimizer, indices = step.optimizer(), sorted(now)
    groups = () if optimizer is None else optimizer.param_groups
    decays = {id(p): float(g.get("weight_decay") or 0) for g in groups for p in g["params"]}
    own = [decays.get(id(p), 0.0) for p in holding.parameters(indices)]
    owners = [name.rpartition(".")[0] for name in holding.model.names]
    modules = {owners[i] for i in indices}
    recorder.emit(
        ZeroGradients(
            at=time.monotonic(),
            model=holding.model.number,
            optimizer=holding.optimizer,
            step=step.number,
            samples=zeros.samples,
            indices=tuple(indices),
            weight_decay=max(own, default=0.0),
            moved=tuple(i for i, decay in zip(indices, own, strict=True) if not decay),
            beside=tuple(i for i in sorted(zeros.alive) if owners[i] in modules),
        )
    )
