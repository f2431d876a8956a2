"""Which parameters have gradients that are always exactly zero, and change all the same?

Gradients are read before steps that are powers of two, and after `ZERO_SAMPLES` of these before
every step that is due, some in turn where they are many. Weight decay or momentum may still move
such parameters.
"""

from __future__ import annotations

import time

from ....events import ZeroGradients
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...tensors.digests import ABSENT, readable
from ...tensors.tensor_watch import TensorWatch, grad_of
from ...training import lifecycle
from ...training.optimizers import Optimizers
from ...training.records import OptimizerModel, Step
from .gradient_sync import GradientSync
from .limits import ZERO_IN_TURN, ZERO_PARAMETERS, ZERO_SAMPLES


class AlwaysZero:
    """Positions of parameters of one model in one optimizer whose gradient is always zero.

    Attributes:
        always: positions with a zero gradient in every sample; None before the first.
        alive: positions with a nonzero gradient in the first sample.
        changed: positions of `always` whose parameters a step changed.
        emitted: positions on record.
        samples: samples so far.
        moved: the parameters at `always`, watched over the current step; None else.
    """

    def __init__(self) -> None:
        self.always: set[int] | None = None
        self.alive: set[int] = set()
        self.changed: set[int] = set()
        self.emitted: set[int] = set()
        self.samples = 0
        self.moved: TensorWatch | None = None


class ZeroGradientWatch(Watcher):
    lost = "gradients that are always zero"
    after = (GradientSync,)  # decides whether gradients were synchronised

    def __init__(self) -> None:
        self._ends = Subscriptions()

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        rare = not step.number & (step.number - 1)
        known: dict[OptimizerModel, AlwaysZero] = step.known.notes.setdefault(AlwaysZero, {})
        for holding in step.holdings:
            watched = known.setdefault(holding, AlwaysZero())
            if watched.always == set() or not (rare or watched.samples >= ZERO_SAMPLES):
                continue
            asked = watched.always
            if asked is not None and not rare and len(asked) > ZERO_IN_TURN:
                each = -(-len(asked) // ZERO_IN_TURN)
                asked = {*sorted(asked)[watched.samples % each :: each]}
            seen = _zero_by_position(holding, asked)
            if seen is None:
                continue
            zero = {position for position, is_zero in seen.items() if is_zero}
            if watched.always is None:
                watched.alive = seen.keys() - zero
            watched.always = zero | ((watched.always or set()) - (asked or set()))
            watched.samples += 1
            if watched.emitted - watched.always:
                _emit(recorder, holding, watched, step)
            if rare and watched.always:
                watched.moved = TensorWatch(sorted(watched.always), holding.parameters)
                watched.moved.keep("step begins")
                self._ends.enable()

    @on(lifecycle.step_ends, during="_ends")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        """Note which parameters with zero gradients the step changed."""
        known: dict[OptimizerModel, AlwaysZero] = step.known.notes.get(AlwaysZero, {})
        for holding, watched in known.items():
            moved, watched.moved = watched.moved, None
            if moved is None:
                continue
            moved.keep("step ends")
            before, after = moved.noted("step begins"), moved.noted("step ends")
            changed = moved.changed("step begins", until="step ends")
            watched.changed.update(p for p in changed if ABSENT not in (before[p], after[p]))
            if watched.samples >= ZERO_SAMPLES:
                _emit(recorder, holding, watched, step)
        self._ends.enable(
            any(
                z.moved is not None
                for k in Optimizers.current.known()
                for z in k.notes.get(AlwaysZero, {}).values()
            )
        )

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        """Correct the record at the end: the last backward may have left nonzero gradients."""
        for known in Optimizers.current.known():
            for holding, watched in known.notes.get(AlwaysZero, {}).items():
                seen = _zero_by_position(holding, watched.emitted) or {}
                ended = {position for position, zero in seen.items() if not zero}
                if ended and watched.always and known.step is not None:
                    watched.always -= ended
                    _emit(recorder, holding, watched, known.step)


def _zero_by_position(holding: OptimizerModel, before: set[int] | None) -> dict[int, bool] | None:
    """For each gradient at positions `before` (None: at all), whether it is all zero.

    Returns None if one cannot be read without waiting for a device.
    """
    positions = holding.synchronised if before is None else sorted(before)
    if len(positions) > ZERO_PARAMETERS:
        return {}
    seen = {}
    for position, parameter in zip(positions, holding.parameters(positions), strict=True):
        gradient = grad_of(parameter)
        if gradient is None:
            continue
        if not readable(gradient):
            return None
        seen[position] = not bool(gradient.any())
    return seen


def _emit(recorder: Recorder, holding: OptimizerModel, watched: AlwaysZero, step: Step) -> None:
    now = watched.changed & (watched.always or set())
    if not now and not watched.emitted:
        return
    watched.emitted = now
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
            samples=watched.samples,
            indices=tuple(indices),
            weight_decay=max(own, default=0.0),
            moved=tuple(i for i, decay in zip(indices, own, strict=True) if not decay),
            beside=tuple(i for i in sorted(watched.alive) if owners[i] in modules),
        )
    )
