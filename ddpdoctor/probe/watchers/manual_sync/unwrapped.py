"""Parameters that are trained without a wrapper: what they are, whether ranks agree on them."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import msgspec

from ....events import Unwrapped, UnwrappedState
from ....events.pack import pack
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.names_in_frames import name_of
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...recording.weak_references import Reference, WeakIdentityMap
from ...source.call_resolver import assignment_in_frames
from ...tensors.collective_payload import Handed
from ...tensors.digests import capturing, sums
from ...tensors.pending_digests import Waiting
from ...training import backwards, lifecycle, optimizers, wrapped_models
from ...training.module_origins import birth_line, birth_site, named_roots
from ...training.records import Step
from ...training.wrapped_models import tensor_of
from . import exchanges, parallelism, pending_works, unused_allreduce

LOST = "models that are trained without a wrapper"

LOOK_AGAIN = 32
EMITTED_AT_MOST = 5000
"""Parameters of one optimizer that are listed."""

SMALL = 64
"""Parameters that are digested at every step of the first `EARLY`, and 16 times per doubling."""

EARLY = 64
EACH = "each"
"""Stands in a state for digests that are on their way."""

CHANGES_AT_MOST = 64
"""Looks because the exchange stopped or went on, or because there was one between steps."""


class Loose:
    """What is known of one optimizer.

    Attributes:
        parameters: those that no wrapper was given.
        exchanged: by what means they were ever exchanged, empty where they never were, or only
            before the first step of all.
        complete, completed, group, inside, shared, averaged, late: as in `UnwrappedState`, of the
            steps so far.
        spread: as in `UnwrappedState`; 0 is the group of all ranks, which is judged by what is
            exchanged in it.
        handed: of the step that is about to be taken.
        carried: `exchanges.carried()` at the last step.
        changes: how often `complete` changed, or much was exchanged by means that are not known.
        waiting: states with digests on their way from a device.
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
        self.spread = -1
        self.handed = Handed()
        self.carried = exchanges.carried()
        self.changes = 0
        self.waiting: list[tuple[UnwrappedState, Waiting, Waiting]] = []


_roots: WeakIdentityMap[int] = WeakIdentityMap()
"""Numbers of outermost modules."""
_numbers = itertools.count()

_following = Subscriptions()
"""Of every step, once there is anything to follow."""


def install() -> None:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    around((c10d, dist), "destroy_process_group", before=_destroying, lost=LOST)
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _following[:] = (lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),)
    hooks.leaving.subscribe(_leaving, lost=LOST)


def _step_due(recorder: Recorder, step: Step) -> None:
    """What a wrapper covers stays covered: look again only now and then."""
    known = step.known.notes.get(Loose)
    if known is None or not (known.parameters or step.number % LOOK_AGAIN):
        _follow(recorder, step)


def _step_begins(recorder: Recorder, step: Step) -> None:
    known = step.known.notes.get(Loose)
    if known is not None and known.parameters:
        _follow(recorder, step)


def _follow(recorder: Recorder, step: Step) -> None:
    optimizer = step.optimizer()
    if optimizer is None or not _several_ranks():
        return
    known = _known(recorder, optimizer, step)
    if not known.parameters or capturing():
        return
    _following.enable()
    every = [ref() for ref in known.parameters]
    alive = [p for p in every if p is not None]
    known.handed = exchanges.handed(every)
    before, known.exchanged = known.exchanged, _exchanged(recorder, known, alive)
    if not recorder.step:
        known.spread = exchanges.spread(alive)
    _write(recorder, known, wait=False)
    complete = not step.closure and _counts(known, known.handed.group)
    known.shared += known.handed.most
    known.averaged += exchanges.parameters_averaged(alive)
    known.late += exchanges.apply(known.parameters)
    pending_works.step_begins([p.grad for p in alive if p.grad is not None])
    due = known.exchanged != before or _due(known, step.number, complete)
    due |= _may_be_equal_now(known, alive)
    known.complete = complete
    if due and any(p.grad is not None for p in alive):
        _look(recorder, step.known.number, known, step.number)
    known.completed += complete
    known.inside += exchanges.handed_inside(every)


def _counts(known: Loose, group: int) -> bool:
    """Whether gradients that were all handed to a group make a step complete: the group is the same
    in all of them. The default one takes the place of others."""
    if group < 0 or known.group == group:
        return group >= 0
    if group and (known.group or known.completed):
        known.group = known.group and -1
        return False
    known.group, known.completed = group, 0
    return True


def _due(known: Loose, step: int, complete: bool) -> bool:
    if step & (step - 1) == 0:
        return True
    if not known.completed:
        return False
    if complete != known.complete and known.changes < CHANGES_AT_MOST:
        known.changes += 1
        return True
    return len(known.parameters) <= SMALL and (
        step < EARLY or step % (1 << step.bit_length() - 5) == 0
    )


def _may_be_equal_now(known: Loose, parameters: list[Any]) -> bool:
    """Whether this is the first step after an exchange that may have been of the parameters, by
    means that are not known."""
    since, known.carried = known.carried, exchanges.carried()
    if known.exchanged or known.changes >= CHANGES_AT_MOST:
        return False
    much = exchanges.as_many(parameters, since)
    known.changes += much
    return much


def _look(
    recorder: Recorder, optimizer: int, known: Loose, step: int, *, last: bool = False
) -> None:
    every = [ref() for ref in known.parameters]
    values, _ = sums(every)
    gradients, _ = sums(None if p is None else p.grad for p in every)
    closely = not last and step & (step - 1) == 0 and len(every) <= EMITTED_AT_MOST
    running, running_site = pending_works.steps(optimizer)
    copied, copied_site = unused_allreduce.share(recorder, every) if closely else (0.0, -1)
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
        partners=parallelism.partners() if known.group > 0 else (),
        inside=known.inside,
        averaged=known.averaged,
        shared=known.shared,
        late=known.late,
        spread=known.spread,
        numbers=exchanges.numbers() if known.spread > 0 else {},
        elements=exchanges.elements(),
        swaps=parallelism.swaps(),
        wrapped=backwards.synced(),
        each=EACH if closely else "",
        handed=pack(known.handed.positions) if closely else "",
        other=known.handed.other if closely else 0,
        exchange_site=exchanges.site() if closely else -1,
        copied=copied,
        copied_site=copied_site,
        within=0 if last else exchanges.within_backward(),
        running=running,
        running_site=running_site,
        last=last,
    )
    known.waiting.append((state, Waiting(gradients), Waiting(values)))
    _write(recorder, known, wait=False)


def _several_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _known(recorder: Recorder, optimizer: Any, step: Step) -> Loose:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    known = step.known.notes.get(Loose)
    if known is not None and (known.held, known.models) == (held, wrapped_models.count()):
        return known
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    covered = wrapped_models.covered()
    mine = [p for p in parameters if _trained(p) and id(p) not in covered]
    if any(_sharded(p) for p in parameters):
        mine = []
    known = step.known.notes[Loose] = Loose(mine)
    known.held, known.models = held, wrapped_models.count()
    if mine:
        _emit(recorder, step, mine)
    return known


def _trained(parameter: Any) -> bool:
    """Some programs freeze a model while its optimizer steps."""
    trained = parameter.requires_grad or parameter.grad is not None
    return bool(trained and parameter.is_floating_point())


def _sharded(parameter: Any) -> bool:
    """FSDP of both kinds and tensor parallelism hold a piece of each parameter per rank."""
    return (
        hasattr(parameter, "device_mesh")
        or hasattr(parameter, "_fsdp_flattened")
        or type(parameter).__name__ == "FlatParameter"
    )


def _made_at(recorder: Recorder, root: Any) -> int:
    """The line that named the model, where it is still in sight; else the one that made it."""
    found = assignment_in_frames(
        sys._getframe(1), lambda code: recorder.sites.kind(code) == "user", root, birth_line(root)
    )
    return recorder.sites.number(found.code, found.line) if found is not None else birth_site(root)


def _emit(recorder: Recorder, step: Step, parameters: list[Any]) -> None:
    names, roots = named_roots(parameters)
    alone = roots or (parameters if len(parameters) == 1 else [])
    one = name_of(id(alone[0]), sys._getframe(1), recorder.sites) if alone else None
    recorder.emit(
        Unwrapped(
            at=time.monotonic(),
            optimizer=step.known.number,
            kind=type(roots[0]).__name__ if roots else "",
            parameters=tuple(
                tensor_of(names.get(id(p), f"parameter {i}"), p)
                for i, p in enumerate(parameters[:EMITTED_AT_MOST])
            ),
            wrapped=wrapped_models.count(),
            root=_roots.setdefault(roots[0], next(_numbers)) if roots else -1,
            site=_made_at(recorder, roots[0] if roots else parameters[0]),
            step_site=step.site,
            name=one.name if one else "",
        ),
        vital=True,
    )


def _exchanged(recorder: Recorder, known: Loose, parameters: list[Any]) -> str:
    """How the ranks ever exchanged these parameters or their gradients. Before the first step of
    all they take the parameters of one to begin with: that does not keep them equal."""
    if found := parallelism.special() or known.exchanged:
        return found
    if known.handed.most:
        return "gradients" if exchanges.gradient_groups() == {0} else "gradients of a group"
    if recorder.step and exchanges.values_exchanged(parameters):
        return "parameters"
    return "unseen" if not wrapped_models.live() and exchanges.unseen() else ""


def _write(recorder: Recorder, known: Loose, *, wait: bool) -> None:
    while known.waiting:
        state, gradients, values = known.waiting[0]
        if not (gradients.ready(wait=wait) and values.ready(wait=wait)):
            return
        known.waiting.pop(0)
        emitted = msgspec.structs.replace(
            state,
            gradients=_one(gradients.values),
            parameters=_one(values.values),
            each=state.each and pack([*gradients.values, *values.values]),
        )
        recorder.emit(emitted, vital=True)


def _one(numbers: list[int]) -> int:
    total = 0
    for place, number in enumerate(numbers, 1):
        total = (total + place * number) & 0x7FFFFFFFFFFF
    return total


def _destroying(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not (args or kwargs.get("group")):
        _finish(recorder, wait=True)


def _leaving(recorder: Recorder, _: None) -> None:
    # A device that hangs is not waited for.
    _finish(recorder, wait=False)


def _finish(recorder: Recorder, *, wait: bool) -> None:
    """The last look at what is exchanged by hand, and what waits to be written."""
    exchanges.no_step_follows()
    for optimizer in optimizers.known():
        if (known := optimizer.notes.pop(Loose, None)) is not None:
            alive = [p for ref in known.parameters if (p := ref()) is not None]
            before, known.exchanged = known.exchanged, _exchanged(recorder, known, alive)
            if (before, known.exchanged) == ("", "parameters"):
                changed = exchanges.values_exchanged(alive, gathered=False)
                known.exchanged = "parameters" if changed else "gathered"
            emitted = known.completed or known.inside or known.spread > 0
            if emitted or known.exchanged != before:
                _look(recorder, optimizer.number, known, optimizer.steps, last=True)
            _write(recorder, known, wait=wait)
