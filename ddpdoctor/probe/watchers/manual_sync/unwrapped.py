"""Which parameters are trained without a wrapper, and do the ranks keep them equal?

Before steps of optimizers that hold such parameters, digests of gradients and parameters are
recorded, together with what the program exchanged itself.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import msgspec

from ....events import AbsentGradients, Unwrapped, UnwrappedState
from ....events.pack import pack
from ...recording import hooks
from ...recording.devices import hands_off
from ...recording.hooks import Subscriptions
from ...recording.names_in_frames import name_of
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import Reference, WeakIdentityMap
from ...source import process_order
from ...source.call_resolver import assignment_in_frames
from ...source.process_order import Place
from ...tensors.collective_payload import PassedGradients
from ...tensors.digests import sums
from ...tensors.pending_digests import Arrivals, Waiting
from ...tensors.shared_memory import shared_memory
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from ...training.records import Step
from ...training.wrapped_models import WrappedModels, tensor_of
from .clipped_gradients import NOT_CLIPPED, ClippedGradients
from .exchanges import Exchanges
from .limits import (
    ABSENCES_EMITTED,
    CHANGES_AT_MOST,
    LOCAL_STEPS,
    LOOK_AGAIN,
    SMALL_MODEL,
    UNWRAPPED_EMITTED,
    UNWRAPPED_FIRST,
)
from .local_gradients import LocalGradients
from .parallelism import ALL_TO_ALL, Parallelism
from .pending_works import PendingWorks
from .trained_parameters import sharded, unwrapped_parameters
from .unused_allreduce import UnusedAllreduce

EACH = "each"
"""Placeholder for digests that are still on their way from a device."""


class UnwrappedParameters:
    """The parameters of one optimizer that belong to no wrapper, and how they were exchanged.

    Attributes:
        held, models: number of parameters of the optimizer and of wrapped models when this was
            made; where either changes, it is made anew.
        exchanged: how they were exchanged so far; empty if never, or only before the first step.
        complete, completed, group, inside, shared, averaged, late, just, spread: see
            `UnwrappedState`; up to the last step.
        passed: gradients passed to collectives for the step about to be taken.
        numbers_passed: `Exchanges.numbers_passed` at the last step.
        changes: extra digests so far, see `CHANGES_AT_MOST`.
        absent: positions of the parameters that had no gradient at the last step; absences: how
            often that is on record.
        local: positions whose gradient came before the all_to_all of the last backward.
        unclipped: the gradients before they were clipped for this step.
        waiting: states whose digests are still on their way from a device.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = [Reference(p) for p in parameters]
        self.held = 0
        self.models = 0
        self.exchanged = ""
        self.complete = False
        self.completed = 0
        self.group = 0
        self.inside = 0
        self.shared = 0
        self.averaged = 0
        self.late = 0
        self.just = False
        self.spread = -1
        self.passed = PassedGradients()
        self.numbers_passed = Exchanges.current.numbers_passed
        self.changes = 0
        self.absent: tuple[int, ...] = ()
        self.absences = 0
        self.local: list[int] = []
        self.unclipped = NOT_CLIPPED
        self.waiting: Arrivals[UnwrappedState] = Arrivals()


class UnwrappedModels(Watcher):
    lost = "models that are trained without a wrapper"
    # Record what the program exchanges itself, and what it clips afterwards.
    after = (Exchanges, LocalGradients, ClippedGradients)

    def __init__(self) -> None:
        # Outermost modules, numbered in the order in which they were recorded.
        self._roots: WeakIdentityMap[int] = WeakIdentityMap()
        self._numbers = itertools.count()
        # Subscription to every step; enabled once an optimizer has parameters outside of
        # wrappers.
        self._following = Subscriptions()

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        self.around((c10d, dist), "destroy_process_group", before=self._destroying)

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        """Look at optimizers whose parameters are all wrapped only now and then: they stay
        wrapped."""
        known = step.known.notes.get(UnwrappedParameters)
        if known is None or not (known.parameters or step.number % LOOK_AGAIN):
            self._look_at_step(recorder, step)

    @on(lifecycle.step_begins, during="_following")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        known = step.known.notes.get(UnwrappedParameters)
        if known is not None and known.parameters:
            self._look_at_step(recorder, step)

    def _look_at_step(self, recorder: Recorder, step: Step) -> None:
        optimizer = step.optimizer()
        if optimizer is None or not _several_ranks():
            return
        known = self._unwrapped_parameters(recorder, optimizer, step)
        if not known.parameters or hands_off():
            return
        self._following.enable()
        every = [ref() for ref in known.parameters]
        alive = [p for p in every if p is not None]
        known.passed = Exchanges.current.gradients_passed(every)
        before, known.exchanged = known.exchanged, _exchanged(recorder, known, alive)
        if not recorder.step:
            known.spread = Exchanges.current.group_of_parameters(alive)
        _write(recorder, known, wait=False)
        if known.passed.most:
            _record_absent(recorder, step, known, every)
        complete = not step.closure and _in_one_group(known, known.passed.group)
        known.shared += known.passed.most
        known.averaged += Exchanges.current.parameters_averaged(alive)
        known.just = Exchanges.current.all_parameters_averaged(alive)
        known.late += Exchanges.current.gradients_applied(known.parameters)
        PendingWorks.current.step_begins([p.grad for p in alive if p.grad is not None])
        due = known.exchanged != before or _digest_due(known, step.number, complete)
        due |= _may_be_equal_now(known, alive)
        if known.just and step.number and known.changes < CHANGES_AT_MOST:
            due, known.changes = True, known.changes + 1
        known.complete = complete
        known.local = LocalGradients.current.leave(step.known.number)
        known.unclipped = ClippedGradients.current.take(optimizer, step.number, every)
        if due and any(p.grad is not None for p in alive):
            _record_state(recorder, step.known.number, known, step.number)
        known.completed += complete
        known.inside += Exchanges.current.all_passed_in_backward(every)
        if known.exchanged == ALL_TO_ALL and step.number < LOCAL_STEPS and not step.closure:
            LocalGradients.current.follow(step.known.number, known.parameters)

    def _unwrapped_parameters(
        self, recorder: Recorder, optimizer: Any, step: Step
    ) -> UnwrappedParameters:
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        known = step.known.notes.get(UnwrappedParameters)
        if known is not None and (known.held, known.models) == (
            held,
            WrappedModels.current.count(),
        ):
            return known
        mine = unwrapped_parameters(optimizer)
        known = step.known.notes[UnwrappedParameters] = UnwrappedParameters(mine)
        known.held, known.models = held, WrappedModels.current.count()
        if mine:
            self._emit(recorder, step, mine)
            lifecycle.unwrapped.fire(recorder, (step.known.number, mine))
        return known

    def _emit(self, recorder: Recorder, step: Step, parameters: list[Any]) -> None:
        names, roots = ModuleOrigins.current.named_roots(parameters)
        alone = roots or (parameters if len(parameters) == 1 else [])
        one = name_of(id(alone[0]), sys._getframe(1), recorder.sites) if alone else None
        places = _places(parameters[:UNWRAPPED_EMITTED], roots)
        unsteady: list[Place] = []
        if places != sorted(places):
            unsteady = process_order.places(type(step.optimizer()), ())
        recorder.emit(
            Unwrapped(
                at=time.monotonic(),
                optimizer=step.known.number,
                kind=type(roots[0]).__name__ if roots else "",
                parameters=tuple(
                    tensor_of(names.get(id(p), f"parameter {i}"), p)
                    for i, p in enumerate(parameters[:UNWRAPPED_EMITTED])
                ),
                wrapped=WrappedModels.current.count(),
                root=self._roots.setdefault(roots[0], next(self._numbers)) if roots else -1,
                site=_made_at(recorder, roots[0] if roots else parameters[0]),
                step_site=step.site,
                name=one.name if one else "",
                sharded=bool(roots) and any(map(sharded, roots[0].parameters())),
                memory=shared_memory(parameters),
                places=pack(places),
                unsteady=tuple(recorder.sites.place(p.file, p.line, "") for p in unsteady),
            ),
            vital=True,
        )

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not (args or kwargs.get("group")):
            _finish(recorder, wait=True)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        # Do not wait for a device: it may hang.
        _finish(recorder, wait=False)


def _places(parameters: list[Any], roots: list[Any]) -> list[int]:
    """As in `Unwrapped`."""
    known = {id(p): n for n, p in enumerate(roots[0].parameters())} if roots else {}
    every = all(id(p) in known for p in parameters)
    return [known[id(p)] for p in parameters] if every else []


def _record_absent(
    recorder: Recorder, step: Step, known: UnwrappedParameters, every: list[Any]
) -> None:
    absent = tuple([i for i, p in enumerate(every) if p is not None and p.grad is None])
    if absent == known.absent or known.absences >= ABSENCES_EMITTED:
        return
    known.absent, known.absences = absent, known.absences + 1
    recorder.emit(
        AbsentGradients(
            at=time.monotonic(),
            optimizer=step.known.number,
            step=step.number,
            positions=pack(absent),
            other=known.passed.other,
        )
    )


def _in_one_group(known: UnwrappedParameters, group: int) -> bool:
    """Whether a step whose gradients were all exchanged in `group` (-1: they were not) continues
    the series of complete steps, which must all use one group.

    The default group replaces another one and starts the count anew.
    """
    if group < 0 or known.group == group:
        return group >= 0
    if group and (known.group or known.completed):
        known.group = known.group and -1
        return False
    known.group, known.completed = group, 0
    return True


def _digest_due(known: UnwrappedParameters, step: int, complete: bool) -> bool:
    """Whether to digest before this step; depends on `step` only, as far as ranks are compared."""
    if step & (step - 1) == 0:
        return True
    if not known.completed:
        return False
    if complete != known.complete and known.changes < CHANGES_AT_MOST:
        known.changes += 1
        return True
    return len(known.parameters) <= SMALL_MODEL and (
        step < UNWRAPPED_FIRST or step % (1 << step.bit_length() - 5) == 0
    )


def _may_be_equal_now(known: UnwrappedParameters, parameters: list[Any]) -> bool:
    """Whether enough was exchanged since the last step, in some unknown form, to make the
    parameters equal again."""
    since, known.numbers_passed = known.numbers_passed, Exchanges.current.numbers_passed
    if known.exchanged or known.changes >= CHANGES_AT_MOST:
        return False
    much = Exchanges.current.enough_for(parameters, since)
    known.changes += much
    return much


def _record_state(
    recorder: Recorder, optimizer: int, known: UnwrappedParameters, step: int, *, last: bool = False
) -> None:
    every = [ref() for ref in known.parameters]
    values, _ = sums(every)
    gradients, _ = sums(None if p is None else p.grad for p in every)
    closely = not last and step & (step - 1) == 0 and len(every) <= UNWRAPPED_EMITTED
    running, running_site = PendingWorks.current.steps(optimizer)
    copied, copied_site = (
        UnusedAllreduce.current.norm_ratio(recorder, every) if closely else (0.0, -1)
    )
    state = UnwrappedState(
        at=time.monotonic(),
        optimizer=optimizer,
        step=step,
        gradients=0,
        parameters=0,
        exchanged=known.exchanged,
        complete=known.complete and not last,
        completed=known.completed,
        group=known.group,
        partners=Parallelism.current.partners(),
        inside=known.inside,
        averaged=known.averaged,
        shared=known.shared,
        late=known.late,
        spread=known.spread,
        numbers=Exchanges.current.numbers_by_group() if known.spread > 0 else {},
        elements=Exchanges.current.elements_after_first_step(),
        swaps=Parallelism.current.all_to_all_calls(),
        wrapped=Backwards.current.synced,
        each=EACH if closely else "",
        handed=pack(known.passed.positions) if closely else "",
        other=known.passed.other if closely else 0,
        exchange_site=Exchanges.current.exchange_site() if closely else -1,
        clip_site=known.unclipped.site if closely else -1,
        copied=copied,
        copied_site=copied_site,
        within=0 if last else Exchanges.current.elements_in_backward(),
        local=pack(known.local) if closely else "",
        running=running,
        running_site=running_site,
        just=known.just and not last,
        last=last,
    )
    unclipped = known.unclipped.digests if closely else Waiting([])
    known.waiting.add(state, Waiting(gradients), Waiting(values), unclipped)
    _write(recorder, known, wait=False)


def optimizers_of(parameters: set[int]) -> list[int]:
    """The optimizers that train any of these parameters outside of wrappers."""
    known = ((o, o.notes.get(UnwrappedParameters)) for o in Optimizers.current.known())
    return [
        optimizer.number
        for optimizer, held in known
        if held and any((p := ref()) is not None and id(p) in parameters for ref in held.parameters)
    ]


def _several_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _made_at(recorder: Recorder, root: Any) -> int:
    """The line that assigns the model to a variable of a running function; else the one that
    constructed it."""
    found = assignment_in_frames(
        sys._getframe(1),
        lambda code: recorder.sites.kind(code) == "user",
        root,
        ModuleOrigins.current.origin_line(root),
    )
    return (
        recorder.sites.number(found.code, found.line)
        if found is not None
        else ModuleOrigins.current.origin_site(root)
    )


def _exchanged(recorder: Recorder, known: UnwrappedParameters, parameters: list[Any]) -> str:
    """How the ranks have exchanged these parameters or their gradients so far.

    An exchange of parameters before the first step does not count: it makes the replicas start
    equal (a broadcast from rank 0) but does not keep them equal.
    """
    if found := Parallelism.current.special or known.exchanged:
        return found
    if known.passed.most:
        return "gradients" if Exchanges.current.gradient_groups() == {0} else "gradients of a group"
    if recorder.step and Exchanges.current.values_exchanged(parameters):
        return "parameters"
    return (
        "unseen"
        if not WrappedModels.current.live() and Exchanges.current.unrecorded_collectives()
        else ""
    )


def _write(recorder: Recorder, known: UnwrappedParameters, *, wait: bool) -> None:
    for state, (gradients, values, unclipped) in known.waiting.take(wait=wait):
        emitted = msgspec.structs.replace(
            state,
            gradients=_combined(gradients),
            parameters=_combined(values),
            each=state.each and pack([*gradients, *values]),
            unclipped=pack(unclipped) if unclipped not in ([], gradients) else "",
        )
        recorder.emit(emitted, vital=True)


def _combined(numbers: list[int]) -> int:
    """One digest of many, which depends on their order; fits into 47 bits."""
    total = 0
    for place, number in enumerate(numbers, 1):
        total = (total + place * number) & 0x7FFFFFFFFFFF
    return total


def _finish(recorder: Recorder, *, wait: bool) -> None:
    """Record the last state of every optimizer, and what still waits to be written."""
    Exchanges.current.no_step_follows()
    for optimizer in Optimizers.current.known():
        if (known := optimizer.notes.pop(UnwrappedParameters, None)) is not None:
            alive = [p for ref in known.parameters if (p := ref()) is not None]
            before, known.exchanged = known.exchanged, _exchanged(recorder, known, alive)
            if (before, known.exchanged) == ("", "parameters"):
                changed = Exchanges.current.values_exchanged(alive, gathered=False)
                known.exchanged = "parameters" if changed else "gathered"
            emitted = known.completed or known.inside or known.spread > 0
            if emitted or known.exchanged != before:
                _record_state(recorder, optimizer.number, known, optimizer.steps, last=True)
            _write(recorder, known, wait=wait)
