"""Do the optimizers hold all parameters that are trained, and no others?

Parameters with gradients are compared with all optimizers' parameters before steps, at growing
intervals. A parameter that no optimizer holds is reported only if it never changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ....events import Ownership
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.torch_compat import ignored_by_ddp, ready_indices
from ...recording.watcher import Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...tensors.digests import ABSENT, digests
from ...training import lifecycle
from ...training.module_origins import ModuleOrigins, sharded_roots
from ...training.optimizers import Optimizers
from ...training.records import Backward, Step
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from .limits import RENEWED


class Watch:
    """One wrapped model, or one that is sharded.

    Attributes:
        number: of the model; negative for one that is sharded.
        began: steps of all optimizers before the model's first backward, or before the last first
            step of an optimizer since.
        due: steps of all optimizers before the next comparison.
        renewed: see `RENEWED`.
        since: steps of the stepping optimizer before the first comparison.
        missing: by name, digest and version of parameters with gradients that no optimizer held at
            the last comparison.
        first: by name, digest and version after the first backward of parameters that no optimizer
            held then; after a renewal, at the first comparison.
        begun: by name, steps of the stepping optimizer when the parameter was first missing.
        emitted: what was recorded last.
    """

    def __init__(self, number: int, began: int = 0) -> None:
        self.number = number
        self.began = self.due = began
        self.renewed = 0
        self.since = -1
        self.missing: dict[str, tuple[int, int]] = {}
        self.first: dict[str, tuple[int, int]] = {}
        self.begun: dict[str, int] = {}
        self.emitted: tuple[object, ...] = ((), 0, False)

    @property
    def new(self) -> bool:
        """Whether the model was compared less than twice."""
        return self.due < self.began + 2

    def is_due(self, step: int) -> bool:
        """Whether to compare at this step; if so, sets the next one (intervals double)."""
        if step < self.due:
            return False
        self.due = self.began + max(1, 2 * (step - self.began))
        return True

    def renew(self, step: int) -> None:
        """An optimizer takes its first step after `step` steps, maybe in place of another one."""
        if step > self.began and self.renewed < RENEWED:
            # An optimizer made before the probe started is known only from its first step on.
            if not self.renewed:
                self.first = {n: s for n, s in self.first.items() if n in self.missing}
            self.renewed += 1
            self.began = self.due = step


class OptimizerCoverage(Watcher):
    lost = "optimizers that hold the wrong parameters"

    def __init__(self) -> None:
        self._watches: dict[Model, Watch] = {}
        self._sharded: WeakIdentityMap[Watch] = WeakIdentityMap()
        # Enabled for models compared less than twice: an optimizer that is older than the model
        # may have few steps that are due.
        self._first_steps = hooks.Subscriptions()

    @on(lifecycle.backward_ends, fast_path=False)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        """Remember missing parameters after a model's first backward, before the program can have
        updated them manually."""
        for model in backward.models:
            inner = model.inner() if model not in self._watches else None
            if inner is not None:
                held = Optimizers.current.parameters()
                watch = self._watches[model] = Watch(model.number, recorder.step)
                self._first_steps.enable()
                loose = {n: p for n, p in _trained(inner).items() if id(p) not in held}
                watch.first = {n: _state(p) for n, p in loose.items()}

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        """Compare before the step, while the gradients still exist."""
        if step.number == 0:
            for watch in self._watches.values():
                watch.renew(recorder.step)
        self._compare_due(recorder, step)
        for module in sharded_roots() if _due(step.number) else ():
            watch = self._sharded.setdefault(module, Watch(-1 - len(self._sharded)))
            _compare(recorder, module, watch, Optimizers.current.parameters(), step)

    @on(lifecycle.step_begins, during="_first_steps", fast_path=False)
    def _new_models(self, recorder: Recorder, step: Step) -> None:
        self._compare_due(recorder, step)
        if not any(watch.new for model, watch in self._watches.items() if model.ddp() is not None):
            self._first_steps.disable()

    def _compare_due(self, recorder: Recorder, step: Step) -> None:
        for model in WrappedModels.current.live():
            # Gradients may be left over from training that has ended.
            if model.backward_step == recorder.step:
                watch = self._watches.setdefault(model, Watch(model.number, recorder.step))
                if watch.is_due(recorder.step):
                    _compare(recorder, model.inner(), watch, Optimizers.current.parameters(), step)

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        if step.number:
            return
        for model, watch in self._watches.items():
            if watch.renewed or not watch.missing:
                continue
            # A second comparison after the first step: the run may have no other one.
            if model.backward_step == recorder.step - 1:
                _compare(recorder, model.inner(), watch, Optimizers.current.parameters(), step)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        """Withdraw what was recorded of a model if optimizers hold all of it at the end."""
        held = Optimizers.current.parameters()
        watched = [(model.inner(), watch) for model, watch in self._watches.items()]
        for inner, watch in [*watched, *self._sharded.items()]:
            if inner is None or not watch.emitted[0]:
                continue
            still = {n for n, p in inner.named_parameters() if id(p) not in held}
            if held and not still.intersection(watch.missing):
                recorder.emit(
                    Ownership(
                        at=time.monotonic(),
                        model=watch.number,
                        kind="",
                        step=recorder.step,
                        trained=0,
                    ),
                    vital=True,
                )


def _due(step: int) -> bool:
    return step & (step - 1) == 0


def _compare(
    recorder: Recorder, inner: Any, watch: Watch, held: dict[int, Any], step: Step
) -> None:
    optimizer = step.optimizer()
    if inner is None or optimizer is None:
        return
    trained = _trained(inner)
    if not trained:
        return
    if watch.since < 0:
        watch.since = step.number
    loose = {n: p for n, p in trained.items() if id(p) not in held}
    state = {n: _state(p) for n, p in loose.items()}
    if watch.renewed:  # optimizers may take turns: what one of them trains has changed by its turn
        watch.first = {**state, **watch.first}
    unchanged = [n for n, s in state.items() if watch.missing.get(n) == watch.first.get(n, s) == s]
    watch.missing = state
    watch.begun = {n: watch.begun.get(n, step.number) for n in loose}
    mine = {id(p): p for p in inner.parameters()}
    holder = _optimizer_to_name(optimizer, mine)
    stale = _stale(holder, mine)
    if watch.number < 0:
        # Without a wrapper it is unknown which backward made these gradients. Only report them if
        # an optimizer holds parameters of no module instead.
        stale = (
            [p for p in stale if not ModuleOrigins.current.in_some_module(p)] if unchanged else []
        )
        unchanged = unchanged if stale else []
    outer = bool(unchanged) and _are_outermost(watch.number, trained, set(unchanged))
    emitted = (tuple(unchanged), len(stale), outer)
    if emitted != watch.emitted:
        watch.emitted = emitted
        _emit(recorder, watch, inner, unchanged, len(trained), holder, stale, outer)


def _trained(inner: Any) -> dict[str, Any]:
    """The parameters that have gradients, by name, without those that DDP ignores."""
    ignored = ignored_by_ddp(inner)
    return {
        n: p
        for n, p in inner.named_parameters()
        if p.requires_grad and p.grad is not None and n not in ignored
    }


def _state(parameter: Any) -> tuple[int, int]:
    """Digest and version of a parameter; a write through `.data` changes the digest only."""
    (digest,) = digests([getattr(parameter, "_local_tensor", parameter)])
    return digest or ABSENT, parameter._version


def _optimizer_to_name(stepping: Any, mine: Mapping[int, Any]) -> Any:
    """The optimizer to name in the record.

    Of those that hold parameters of the model, one with stale parameters, or else the one that
    holds most of the model. If none does, one that holds a copy of the model, or the one that
    steps. Among equals, the one that steps.
    """
    best, most = stepping, (0, False, 0, False)
    sizes = Counter(p.shape for p in mine.values() if p.requires_grad)
    for optimizer in Optimizers.current.made():
        held = [p for group in optimizer.param_groups for p in group["params"]]
        ours, stale = sum(id(p) in mine for p in held), _stale(optimizer, mine)
        copied = not ours and stale and Counter(p.shape for p in stale) == sizes
        weight = (min(ours, 1), bool(stale), ours, optimizer is stepping)
        if (ours or copied) and weight > most:
            best, most = optimizer, weight
    return best


def _stale(optimizer: Any, mine: Container[int]) -> list[Any]:
    """Parameters of an optimizer that cannot be trained: they never got a gradient and belong to
    no module any more, or all its parameters are untrained and belong to other modules.

    If all its parameters belong to no module any more, they may have been trained before.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    idle = [p for p in held if p.requires_grad and p.grad is None and id(p) not in mine]
    fresh = [p for p in idle if p not in optimizer.state]
    if len(fresh) == len(held):
        return fresh
    if len(idle) == len(held) and not any(map(ModuleOrigins.current.in_some_module, idle)):
        return idle
    return [p for p in fresh if not ModuleOrigins.current.in_some_module(p)]


def _are_outermost(number: int, trained: Iterable[str], missing: Container[str]) -> bool:
    """Whether the missing parameters are the farthest from the loss: their gradients come last, by
    DDP's recorded order, or else they come first in the model."""
    order = _gradient_order(number) or list(trained)[::-1]
    lost = [name in missing for name in order]
    return lost == sorted(lost) and not all(lost)


def _gradient_order(number: int) -> list[str]:
    """Names of a wrapped model's parameters in the order in which their gradients became ready."""
    for model in WrappedModels.current.live():
        if model.number == number:
            positions = ready_indices(model.ddp()) or []
            known = [model.expected[i] for i in positions if i < len(model.expected)]
            return [model.names[position] for position in known]
    return []


def _emit(
    recorder: Recorder,
    watch: Watch,
    inner: Any,
    missing: list[str],
    trained: int,
    optimizer: Any,
    stale: list[Any],
    outer: bool,
) -> None:
    owners = dict(inner.named_modules())
    site = -1
    if missing:
        owner, _, last = missing[0].rpartition(".")
        module = owners.get(owner)
        site = ModuleOrigins.current.parameter_site(module, last) if module is not None else -1
        site = (
            ModuleOrigins.current.origin_site(module) if site < 0 and module is not None else site
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    whose, other = _shared_model(optimizer, inner)
    recorder.emit(
        Ownership(
            at=time.monotonic(),
            model=watch.number,
            kind=type(optimizer).__name__,
            module=type(inner).__name__.removeprefix("FSDP"),
            step=recorder.step,
            missing=tuple(missing),
            trained=trained,
            held=len(held),
            frozen=sum(not p.requires_grad for p in held),
            stale=tuple("x".join(map(str, p.shape)) for p in stale) if whose < 0 else (),
            site=Optimizers.current.made_at(optimizer),
            made=site,
            since=watch.since,
            outer=outer,
            empty=sum(not group["params"] for group in optimizer.param_groups),
            begun=min((watch.begun[n] for n in missing), default=-1),
            whose=whose,
            other=other,
        ),
        vital=True,
    )


def _shared_model(optimizer: Any, inner: Any) -> tuple[int, int]:
    """Number of another trained model that an optimizer's parameters all belong to, and the line of
    a second optimizer that holds them too; (-1, -1) if there is none."""
    held = _parameter_ids(optimizer)
    second = next(
        (o for o in Optimizers.current.made() if o is not optimizer and held <= _parameter_ids(o)),
        None,
    )
    if not held or second is None or not held.isdisjoint(map(id, inner.parameters())):
        return -1, -1
    whole = (
        m
        for m in WrappedModels.current.live()
        if m.backwards and held <= {id(p()) for p in m.parameters}
    )
    whose = next((model.number for model in whole), -1)
    return (whose, Optimizers.current.made_at(second)) if whose >= 0 else (-1, -1)


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
