"""What ranks exchange by hand: whether gradients or parameters were among it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ....events.operations import operation
from ...collectives import call_hooks, process_groups
from ...collectives.call_hooks import Call
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import sequence_number
from ...recording.weak_references import Reference
from ...tensors.collective_payload import ENOUGH, FLAT, Exchange, Handed, covers
from ...tensors.gradient_versions import memory_of
from ...training import backwards, lifecycle, optimizers, wrapped_models
from ...training.records import Backward, Step
from ...training.steady_state import routine
from . import parallelism

LOST = "gradients that are synchronised by hand"

KEPT = 20_000
SITES_KNOWN = 3
"""Steps in which the line of an exchange is looked up."""


class _Window:
    """Since the last backward ended (`recent`), and since the step before (`earlier`).

    Attributes:
        within: inside a backward, where all of DDP's communication hooks (`hooks`) are known to
            average gradients; `inside` any other one. Hooks that are not known to may exchange
            parameters, until they are seen to leave these as they are (`spared`).
        stepped: an optimizer has stepped since; others may step yet before the next backward.
        elements: floating-point numbers that were ever handed over, first step not included;
            `carried` are numbers of any kind, of any step, `numbers` the same by group.
        site: the line of the last exchange in a backward or before the step, of the first few.
        calls: on the default group, since the last step; `sequence` is torch's count then.
        latest: what the last call carries.
        number: of this window; between: elements in it that may be of parameters.
        applied: parameters without a wrapper, by the memory of the gradient that was applied since
            the backward; `late` are the identities of those whose gradient was handed over only
            after that.
        derived: steps of any optimizer before the last `torch.autograd.grad` of parameters.
        owners: what any optimizer holds, by the memory of its value and of its gradient; looked up
            once after each backward, None until somebody asks.
    """

    def __init__(self) -> None:
        self.recent: list[Exchange] = []
        self.earlier: list[Exchange] = []
        self.within: list[Exchange] = []
        self.inside: list[Exchange] = []
        self.hooks: set[bool] = set()
        self.spared = False
        self.stepped, self.elements, self.carried = False, 0, 0
        self.numbers: Counter[int] = Counter()
        self.site, self.calls = -1, 0
        self.uncounted = False
        self.sequence = -1
        self.latest: tuple[Exchange, ...] = ()
        self.number = self.between = 0
        self.applied: dict[int, Reference] = {}
        self.late: set[int] = set()
        self.derived = -1
        self.owners: dict[int, Reference] | None = None

    def begin(self) -> None:
        """Something happens after the step."""
        if self.stepped:
            self.recent, self.earlier, self.within, self.inside = [], [], [], []
            self.stepped = False
            self.late = set()
            self.number, self.between = self.number + 1, 0


_window = _Window()
_following = Subscriptions()
"""Of what ends a window, while there is something in it."""


def install() -> None:
    _window.__init__()  # type: ignore[misc]
    parallelism.install()
    call_hooks.called.subscribe(_called, lost=LOST)
    _following[:] = (
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST),
    )


def _called(recorder: Recorder, call: Call) -> None:
    _following.enable()
    _window.begin()
    _window.latest = ()
    size = sum([tensor.numel() for tensor in call.tensors])
    _window.carried += size
    _window.numbers[call.group] += size
    kind = operation(call.op)
    if call.p2p:
        parallelism.seen(parallelism.POINT_TO_POINT, call.peers)
    elif call.group == 0:
        _window.calls += 1
        # These are made of several of torch's own.
        _window.uncounted |= kind.objects or kind.meets
    if not call.carries_values:
        return
    inside = backwards.running()
    after_backward = backwards.since(recorder.step) or _window.derived == recorder.step
    kept = _window.recent if after_backward else _window.earlier
    if inside and _window.hooks == {True}:
        kept = _window.within
    if (after_backward or inside) and recorder.step < SITES_KNOWN:
        _window.site = recorder.site()
    amid = _amid(recorder.step)
    for tensor in call.tensors:
        if len(kept) < KEPT and tensor.is_floating_point():
            memory = memory_of(tensor)
            sort = call.gathers, amid or tensor.requires_grad
            exchange = Exchange(call.group, tensor.numel(), memory, *sort)
            _window.latest += (exchange,)
            if not (after_backward or inside) and (late := _applied(memory)):
                _window.late.add(late)
                continue
            kept.append(exchange)
            known = amid or (inside and _window.hooks == {True})
            _window.between += 0 if known else tensor.numel()
            _window.elements += tensor.numel() if recorder.step else 0
            if call.op.startswith("all_to_all"):
                parallelism.seen(parallelism.ALL_TO_ALL, process_groups.others(call.group))
                if tensor is call.tensors[0]:
                    parallelism.swapped(inside=inside)
            elif inside:
                parallelism.seen(parallelism.IN_BACKWARD, process_groups.others(call.group))
                _window.inside.append(exchange)


def _amid(step: int) -> bool:
    """Whether a backward runs in which no hook of DDP's may exchange parameters, or one is still to
    come."""
    if backwards.running():
        return not _window.hooks or _window.spared
    return any(m.pending and m.forward_step == step for m in wrapped_models.live())


def derives(recorder: Recorder, inputs: Iterable[Any]) -> None:
    """`torch.autograd.grad` of these: of parameters, the gradients are there without a backward."""
    from torch.nn import Parameter

    if not backwards.running() and any(isinstance(t, Parameter) for t in inputs):
        _window.begin()
        _window.derived = recorder.step


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    _window.begin()
    _window.applied = {}
    _window.owners = None
    _window.earlier += _window.recent
    _window.recent = []
    if _window.earlier:
        routine.hasten()


def _step_ends(recorder: Recorder, step: Step) -> None:
    _window.stepped = True
    _window.uncounted, _window.calls = False, 0
    # Only asked where nothing is wrapped.
    _window.sequence = -1 if wrapped_models.live() else sequence_number(_world())
    if wrapped_models.live():
        _window.begin()
        _following.disable()


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def latest() -> tuple[Exchange, ...]:
    """What the last call carries."""
    return _window.latest


def unseen() -> bool:
    """Whether the default group communicated since the last step by ways that are not watched."""
    known = _window.sequence >= 0 and not _window.uncounted
    return known and sequence_number(_world()) - _window.sequence > _window.calls


def hook_seen(averages: bool) -> None:
    """A model has a communication hook, which is known to average gradients or is not."""
    _window.hooks.add(averages)


def hooks_spare_parameters() -> None:
    """What hooks exchanged was not written to the parameters, time and again."""
    _window.spared = True


def in_hook() -> bool:
    """A collective is about to be made: whether by one of DDP's communication hooks, which may
    exchange parameters for all that is known."""
    if _window.spared or False not in _window.hooks or not backwards.running():
        return False
    _window.begin()
    return True


def in_hooks_alone() -> bool:
    """Whether all that was exchanged since the last step was so inside a backward, by DDP's
    communication hooks."""
    every = [*_window.recent, *_window.earlier]
    return bool(every and _window.hooks) and len(every) == len(_window.inside)


def in_smaller_groups(ranks: Sequence[int]) -> bool:
    """Whether all that hooks exchanged since the last step went to some of these ranks only."""
    reached = [len(process_groups.others(one.group)) + 1 for one in _window.inside]
    return in_hooks_alone() and all(1 < size < len(ranks) for size in reached)


def between() -> tuple[int, int]:
    """The number of this window, and how many elements in it may be of parameters."""
    return _window.number, _window.between


def before_backward() -> bool:
    """Whether anything was exchanged between the last step and the last backward."""
    return bool(_window.earlier)


def parameters_exchanged(parameters: Sequence[Any]) -> bool:
    """Whether collectives between the last step and the last backward carried the parameters
    themselves, and not their gradients."""
    if not _window.earlier:
        return False
    gradients = {memory_of(p.grad) for p in parameters if p.grad is not None}
    own = {memory_of(p) for p in parameters}
    kept = [e for e in _window.earlier if e.memory in own or not e.amid]
    return covers([e for e in kept if e.memory not in gradients], parameters)


def gradients_exchanged(parameters: Sequence[Any]) -> bool:
    """Whether the gradients of these parameters were handed to collectives since the backward."""
    return covers(_window.recent, [p.grad for p in parameters if p.grad is not None])


def handed(parameters: Sequence[Any]) -> Handed:
    """What was handed over of the gradients of these parameters, some of which may be None."""
    found = _handed(_window.recent, parameters)
    return found if parallelism.replicas(found.group) else found._replace(group=-1)


def handed_inside(parameters: Sequence[Any]) -> bool:
    """Whether collectives inside the backward carried all gradients of these parameters and hardly
    anything else (hooks do that): not what the ranks of a group compute together."""
    sizes = [p.grad.numel() for p in parameters if p is not None and p.grad is not None]
    if sum(e.elements for e in _window.inside) > FLAT[1] * sum(sizes):
        return False
    return (
        parallelism.special() == parallelism.IN_BACKWARD
        and _handed(_window.inside, parameters).every
    )


def within_backward() -> int:
    """How many numbers were handed to collectives inside the backwards since the last step."""
    return sum(e.elements for e in _window.inside)


def _handed(exchanges: list[Exchange], parameters: Sequence[Any]) -> Handed:
    if not exchanges:
        return Handed()
    gradients = {
        i: p.grad for i, p in enumerate(parameters) if p is not None and p.grad is not None
    }
    own = {memory_of(p) for p in parameters if p is not None}
    memory = {i: memory_of(g) for i, g in gradients.items()}
    held: Counter[int] = Counter()
    for i, gradient in gradients.items():
        held[memory[i]] += gradient.numel()
    carried: Counter[int] = Counter()
    # Of gradients that share one memory, a part may have been exchanged.
    sizes: Counter[tuple[int, int]] = Counter()
    for exchange in _without_others(exchanges, {*own, *held}):
        if exchange.memory not in own:
            place = exchange.memory if exchange.memory in held else 0
            carried[place] += exchange.elements
            sizes[place, exchange.elements] += 1
    found = []
    for i, gradient in gradients.items():
        size = gradient.numel()
        if carried[memory[i]] < held[memory[i]]:
            place = memory[i] if sizes[memory[i], size] else 0
            if not sizes[place, size]:
                continue
            sizes[place, size] -= 1
        found.append(i)
    total = sum(held.values())
    emitted = sum(gradients[i].numel() for i in found)
    other = sum(size * count for (place, size), count in sizes.items() if not place)
    flat = other if other <= FLAT[1] * total else 0
    used = {e.group for e in exchanges if e.elements > 1 or e.memory in held}  # no loss, no norm
    used = used or {e.group for e in exchanges}
    whole = emitted == total or total - emitted <= other <= total - emitted + (FLAT[1] - 1) * total
    group = used.pop() if total and whole and len(used) == 1 else -1
    return Handed(tuple(found), other, group, bool(total) and emitted + flat >= ENOUGH * total)


def apply(parameters: Sequence[Reference]) -> bool:
    """The gradients of these parameters are about to be applied. Whether those of the step before
    were handed over after that."""
    late = False
    for reference in parameters:
        parameter = reference()
        if parameter is not None and parameter.grad is not None:
            _window.applied[memory_of(parameter.grad)] = reference
            late |= id(parameter) in _window.late
    return late


def _applied(memory: int) -> int:
    """Identity of the parameter whose gradient, applied and not dropped since, lies there; 0 for
    none."""
    reference = _window.applied.get(memory)
    parameter = None if reference is None else reference()
    gradient = None if parameter is None else parameter.grad
    there = gradient is not None and memory_of(gradient) == memory
    return id(parameter) if there else 0


def parameters_averaged(parameters: Sequence[Any]) -> bool:
    """Whether collectives since the last step carried the parameters themselves."""
    if parameters_exchanged(parameters):
        return True
    if not _window.recent:
        return False
    own = {memory_of(p) for p in parameters}
    return any(e.memory in own for e in _window.recent)


def elements() -> int:
    """How many floating-point numbers were handed to collectives since the first step."""
    return _window.elements


def carried() -> int:
    """How many numbers of any kind this rank ever handed to collectives or to a peer."""
    return _window.carried


def numbers() -> dict[int, int]:
    """The same by group."""
    return dict(_window.numbers)


def spread(parameters: Sequence[Any]) -> int:
    """The one group that these parameters themselves, all of them, were handed to since the last
    step, -1 for none."""
    sizes = {memory_of(p): p.numel() for p in parameters}
    every = [e for e in (*_window.recent, *_window.earlier) if sizes.get(e.memory) == e.elements]
    groups = {e.group for e in every if not e.gathered}
    whole = len(groups) == 1 and sizes.keys() == {e.memory for e in every}
    return groups.pop() if whole else -1


def as_many(parameters: Sequence[Any], since: int) -> bool:
    """Whether that many numbers as these parameters have, or nearly so, were handed over since
    `carried()` was that: local SGD may have made them equal, whatever it was that it exchanged."""
    new = _window.carried - since
    return bool(new) and new >= ENOUGH * sum(p.numel() for p in parameters)


def site() -> int:
    """The line of an exchange in a backward or before a step, -1 where there was none early on."""
    return _window.site


def gradient_groups() -> set[int]:
    """The groups of the exchanges since the backward."""
    return {e.group for e in _window.recent}


def values_exchanged(parameters: Sequence[Any], *, gathered: bool = True) -> bool:
    """Whether collectives since the last step carried these parameters, or as much as they are;
    `gathered`: be it that they were only gathered."""
    every = [*_window.recent, *_window.earlier, *_window.within]
    every = [e for e in every if gathered or not e.gathered]
    if not covers(every, parameters):
        return False
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = {memory_of(t) for t in (*parameters, *gradients)}
    return covers(_without_others(every, own), parameters)


def no_step_follows() -> None:
    """What was exchanged for the last step is no exchange after it."""
    _window.begin()


def _without_others(exchanges: list[Exchange], own: set[int]) -> list[Exchange]:
    """Without what lies neither in the memory `own` nor in buffers, but is the value or the
    gradient of what another optimizer holds."""
    return [e for e in exchanges if e.memory in own or not _held(e.memory)]


def _held(memory: int) -> bool:
    """Whether the value or the gradient of a parameter of some optimizer lies there."""
    if _window.owners is None:
        _window.owners = {}
        for parameter in optimizers.held().values():
            owner = Reference(parameter)
            _window.owners.update((place, owner) for place in _places(parameter))
    reference = _window.owners.get(memory)
    return reference is not None and memory in _places(reference())


def _places(parameter: Any) -> list[int]:
    """Where its value and its gradient lie."""
    tensors = () if parameter is None else (parameter, parameter.grad)
    return [memory_of(t) for t in tensors if t is not None]
