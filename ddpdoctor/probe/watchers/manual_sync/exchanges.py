"""Which gradients or parameters does the program itself pass to collectives?

Every call is looked at when it is made. What it carries is assigned to the step around it, by
whether a backward has ended since the last step.
"""

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
from ...tensors.collective_payload import ENOUGH, FLAT, Exchange, PassedGradients, covers
from ...tensors.gradient_versions import memory_of
from ...training import backwards, lifecycle, optimizers, wrapped_models
from ...training.records import Backward, Step
from ...training.steady_state import steady_state
from . import parallelism

LOST = "gradients that are synchronised manually"

KEPT = 20_000
"""Exchanges remembered per list: a loop without any step must not fill the memory."""

SITES_KNOWN = 3
"""Steps in which the line of an exchange is looked up: walking the stack is too slow for all."""


class _Window:
    """The exchanges between one optimizer step and the next.

    Attributes:
        recent: exchanges since the last backward ended.
        earlier: exchanges between the step and the end of that backward.
        in_averaging_hooks: exchanges during a backward while every communication hook of DDP is
            known to average gradients.
        in_backward: all other exchanges during a backward. A hook that is not known to average
            gradients may exchange parameters.
        hooks: for each model with a communication hook, whether the hook is known to average.
        spared: unknown hooks have left the parameters unchanged so often that they are trusted.
        stepped: an optimizer has stepped; others may still step before the next backward.
        elements: floating-point numbers passed to collectives since the first step.
        numbers_passed: numbers of any type passed to collectives or peers since the start.
        numbers_by_group: `numbers_passed`, by group.
        site: line of the last exchange during a backward or between backward and step, looked up
            in the first `SITES_KNOWN` steps only.
        calls: recorded calls on the default group since the last step.
        uncounted: one of these calls consists of several collectives in torch's own count.
        sequence: torch's count of collectives of the default group at the last step, -1 if
            unknown.
        latest: what the last call carries.
        number: counts windows.
        maybe_parameters: elements exchanged in this window that may belong to parameters.
        applied: unwrapped parameters by the memory of the gradient that a step has applied since
            the backward.
        late: identities of parameters whose gradient was exchanged only after it was applied.
        autograd_grad_step: steps of all optimizers before the last `torch.autograd.grad` with
            respect to parameters.
        owners: parameters of all optimizers by the memory of value and gradient; built once per
            backward, None until needed.
    """

    def __init__(self) -> None:
        self.recent: list[Exchange] = []
        self.earlier: list[Exchange] = []
        self.in_averaging_hooks: list[Exchange] = []
        self.in_backward: list[Exchange] = []
        self.hooks: set[bool] = set()
        self.spared = False
        self.stepped, self.elements, self.numbers_passed = False, 0, 0
        self.numbers_by_group: Counter[int] = Counter()
        self.site, self.calls = -1, 0
        self.uncounted = False
        self.sequence = -1
        self.latest: tuple[Exchange, ...] = ()
        self.number = self.maybe_parameters = 0
        self.applied: dict[int, Reference] = {}
        self.late: set[int] = set()
        self.autograd_grad_step = -1
        self.owners: dict[int, Reference] | None = None

    def begin(self) -> None:
        """Start the next window if a step has ended this one."""
        if self.stepped:
            self.recent, self.earlier = [], []
            self.in_averaging_hooks, self.in_backward = [], []
            self.stepped = False
            self.late = set()
            self.number, self.maybe_parameters = self.number + 1, 0


_window = _Window()
_following = Subscriptions()
"""Subscriptions to the ends of backwards and steps; enabled while the window has exchanges."""


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
    _window.numbers_passed += size
    _window.numbers_by_group[call.group] += size
    kind = operation(call.op)
    if call.p2p:
        parallelism.seen(parallelism.POINT_TO_POINT, call.peers)
    elif call.group == 0:
        _window.calls += 1
        # torch builds these of several collectives, which its sequence number counts one by one.
        _window.uncounted |= kind.objects or kind.meets
    if not call.carries_values:
        return
    inside = backwards.running()
    after_backward = backwards.since(recorder.step) or _window.autograd_grad_step == recorder.step
    kept = _window.recent if after_backward else _window.earlier
    if inside and _window.hooks == {True}:
        kept = _window.in_averaging_hooks
    if (after_backward or inside) and recorder.step < SITES_KNOWN:
        _window.site = recorder.site()
    amid = _backward_pending(recorder.step)  # then the tensors may be a model's input or output
    for tensor in call.tensors:
        if len(kept) < KEPT and tensor.is_floating_point():
            memory = memory_of(tensor)
            sort = call.gathers, amid or tensor.requires_grad
            exchange = Exchange(call.group, tensor.numel(), memory, *sort)
            _window.latest += (exchange,)
            if not (after_backward or inside) and (late := _applied_parameter(memory)):
                _window.late.add(late)
                continue
            kept.append(exchange)
            known = amid or (inside and _window.hooks == {True})
            _window.maybe_parameters += 0 if known else tensor.numel()
            _window.elements += tensor.numel() if recorder.step else 0
            if call.op.startswith("all_to_all"):
                parallelism.seen(parallelism.ALL_TO_ALL, process_groups.other_members(call.group))
                if tensor is call.tensors[0]:
                    parallelism.all_to_all_called(inside=inside)
            elif inside:
                parallelism.seen(parallelism.IN_BACKWARD, process_groups.other_members(call.group))
                _window.in_backward.append(exchange)


def _backward_pending(step: int) -> bool:
    """Whether a backward runs, or a forward of this step still waits for its backward.

    A backward does not count while a communication hook might exchange parameters in it.
    """
    if backwards.running():
        return not _window.hooks or _window.spared
    return any(m.pending and m.forward_step == step for m in wrapped_models.live())


def autograd_grad_called(recorder: Recorder, inputs: Iterable[Any]) -> None:
    """Note a `torch.autograd.grad` with respect to `inputs`.

    With respect to parameters it yields gradients without a backward: exchanges that follow are
    counted as if after one.
    """
    from torch.nn import Parameter

    if not backwards.running() and any(isinstance(t, Parameter) for t in inputs):
        _window.begin()
        _window.autograd_grad_step = recorder.step


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    _window.begin()
    _window.applied = {}
    _window.owners = None  # a backward may have replaced the gradients
    _window.earlier += _window.recent
    _window.recent = []
    if _window.earlier:
        steady_state.observe_next_step()


def _step_ends(recorder: Recorder, step: Step) -> None:
    _window.stepped = True
    _window.uncounted, _window.calls = False, 0
    # Only `unrecorded_collectives` reads it, and only programs without a wrapper call that.
    _window.sequence = -1 if wrapped_models.live() else sequence_number(_world())
    if wrapped_models.live():
        _window.begin()
        _following.disable()


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def latest_exchanges() -> tuple[Exchange, ...]:
    """The floating-point tensors of the last call."""
    return _window.latest


def unrecorded_collectives() -> bool:
    """Whether torch counts more collectives on the default group since the last step than the
    probe recorded (a C++ extension, say)."""
    known = _window.sequence >= 0 and not _window.uncounted
    return known and sequence_number(_world()) - _window.sequence > _window.calls


def hook_seen(averages: bool) -> None:
    """Register a model's communication hook; `averages`: it is known to average gradients."""
    _window.hooks.add(averages)


def hooks_spare_parameters() -> None:
    """Trust unknown hooks: in several steps their exchanges left the parameters unchanged."""
    _window.spared = True


def in_comm_hook() -> bool:
    """Whether the collective about to be made comes from a communication hook of DDP that may
    exchange parameters."""
    if _window.spared or False not in _window.hooks or not backwards.running():
        return False
    _window.begin()
    return True


def only_in_hooks() -> bool:
    """Whether every exchange since the last step was made by DDP's communication hooks."""
    every = [*_window.recent, *_window.earlier]
    return bool(every and _window.hooks) and len(every) == len(_window.in_backward)


def in_smaller_groups(ranks: Sequence[int]) -> bool:
    """Whether DDP's hooks exchanged since the last step in proper subgroups of `ranks` only."""
    reached = [len(process_groups.other_members(one.group)) + 1 for one in _window.in_backward]
    return only_in_hooks() and all(1 < size < len(ranks) for size in reached)


def window_elements() -> tuple[int, int]:
    """The number of this window, and how many elements exchanged in it may be parameters."""
    return _window.number, _window.maybe_parameters


def before_backward() -> bool:
    """Whether anything was exchanged between the last step and the last backward."""
    return bool(_window.earlier)


def parameters_exchanged(parameters: Sequence[Any]) -> bool:
    """Whether collectives between the last step and the end of the last backward carried these
    parameters, not their gradients."""
    if not _window.earlier:
        return False
    gradients = {memory_of(p.grad) for p in parameters if p.grad is not None}
    own = {memory_of(p) for p in parameters}
    kept = [e for e in _window.earlier if e.memory in own or not e.amid]
    return covers([e for e in kept if e.memory not in gradients], parameters)


def gradients_exchanged(parameters: Sequence[Any]) -> bool:
    """Whether the gradients of these parameters were passed to collectives since the backward."""
    return covers(_window.recent, [p.grad for p in parameters if p.grad is not None])


def gradients_passed(parameters: Sequence[Any]) -> PassedGradients:
    """Which gradients of these parameters were passed to collectives since the backward.

    The group is -1 if its ranks also do what replicas do not do. Parameters may be None.
    """
    found = _passed(_window.recent, parameters)
    return found if parallelism.holds_replicas(found.group) else found._replace(group=-1)


def all_passed_in_backward(parameters: Sequence[Any]) -> bool:
    """Whether collectives inside the backward carried all gradients of these parameters and little
    else, as hooks on parameters do. Tensor parallelism, for one, carries activations too."""
    sizes = [p.grad.numel() for p in parameters if p is not None and p.grad is not None]
    if sum(e.elements for e in _window.in_backward) > FLAT[1] * sum(sizes):
        return False
    return (
        parallelism.special() == parallelism.IN_BACKWARD
        and _passed(_window.in_backward, parameters).every
    )


def elements_in_backward() -> int:
    """Elements passed to collectives inside backwards since the last step."""
    return sum(e.elements for e in _window.in_backward)


def _passed(exchanges: list[Exchange], parameters: Sequence[Any]) -> PassedGradients:
    """Match exchanges to gradients: by memory first, then by size, then as one flat buffer."""
    if not exchanges:
        return PassedGradients()
    gradients = {
        i: p.grad for i, p in enumerate(parameters) if p is not None and p.grad is not None
    }
    own = {memory_of(p) for p in parameters if p is not None}
    memory = {i: memory_of(g) for i, g in gradients.items()}
    held: Counter[int] = Counter()
    for i, gradient in gradients.items():
        held[memory[i]] += gradient.numel()
    carried: Counter[int] = Counter()
    # Gradients may be views of one buffer: only some of them may have been exchanged, so count
    # sizes per memory too. Memory 0 stands for tensors that are no gradient: copies, or others.
    sizes: Counter[tuple[int, int]] = Counter()
    for exchange in _without_other_optimizers(exchanges, {*own, *held}):
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
    # Single numbers are losses and norms; the program may reduce them on any group.
    used = {e.group for e in exchanges if e.elements > 1 or e.memory in held}
    used = used or {e.group for e in exchanges}
    whole = emitted == total or total - emitted <= other <= total - emitted + (FLAT[1] - 1) * total
    group = used.pop() if total and whole and len(used) == 1 else -1
    return PassedGradients(
        tuple(found), other, group, bool(total) and emitted + flat >= ENOUGH * total
    )


def gradients_applied(parameters: Sequence[Reference]) -> bool:
    """Note that a step is about to apply the gradients of these parameters.

    Returns whether gradients of the step before were passed to collectives only after that step.
    """
    late = False
    for reference in parameters:
        parameter = reference()
        if parameter is not None and parameter.grad is not None:
            _window.applied[memory_of(parameter.grad)] = reference
            late |= id(parameter) in _window.late
    return late


def _applied_parameter(memory: int) -> int:
    """Identity of the parameter whose applied gradient still lies at `memory`; 0 if none."""
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


def elements_after_first_step() -> int:
    """Floating-point numbers passed to collectives since the first step."""
    return _window.elements


def numbers_passed() -> int:
    """Numbers of any type that this rank has passed to collectives or to a peer since the start."""
    return _window.numbers_passed


def numbers_by_group() -> dict[int, int]:
    """`numbers_passed`, by the number of the process group."""
    return dict(_window.numbers_by_group)


def group_of_parameters(parameters: Sequence[Any]) -> int:
    """The one group in which all these parameters (no copies) were exchanged since the last step;
    -1 if there is none."""
    sizes = {memory_of(p): p.numel() for p in parameters}
    every = [e for e in (*_window.recent, *_window.earlier) if sizes.get(e.memory) == e.elements]
    groups = {e.group for e in every if not e.gathered}
    whole = len(groups) == 1 and sizes.keys() == {e.memory for e in every}
    return groups.pop() if whole else -1


def enough_for(parameters: Sequence[Any], since: int) -> bool:
    """Whether enough numbers were exchanged since `numbers_passed()` was `since` to synchronise
    these parameters, in whatever form."""
    new = _window.numbers_passed - since
    return bool(new) and new >= ENOUGH * sum(p.numel() for p in parameters)


def exchange_site() -> int:
    """Site of an exchange during a backward or between backward and step; -1 if the first steps
    had none."""
    return _window.site


def gradient_groups() -> set[int]:
    """Numbers of the groups used since the last backward."""
    return {e.group for e in _window.recent}


def values_exchanged(parameters: Sequence[Any], *, gathered: bool = True) -> bool:
    """Whether collectives since the last step carried these parameters, or tensors of their sizes.

    Args:
        gathered: count collectives that only gather, and so leave the parameters unchanged.
    """
    every = [*_window.recent, *_window.earlier, *_window.in_averaging_hooks]
    every = [e for e in every if gathered or not e.gathered]
    if not covers(every, parameters):
        return False
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = {memory_of(t) for t in (*parameters, *gradients)}
    return covers(_without_other_optimizers(every, own), parameters)


def no_step_follows() -> None:
    """End the window of the last step at the end of the run."""
    _window.begin()


def _without_other_optimizers(exchanges: list[Exchange], own: set[int]) -> list[Exchange]:
    """Drop exchanges of values and gradients of parameters of other optimizers."""
    return [e for e in exchanges if e.memory in own or not _belongs_to_optimizer(e.memory)]


def _belongs_to_optimizer(memory: int) -> bool:
    """Whether the value or gradient of a parameter of any optimizer lies at `memory`."""
    if _window.owners is None:
        _window.owners = {}
        for parameter in optimizers.parameters().values():
            owner = Reference(parameter)
            _window.owners.update((place, owner) for place in _addresses(parameter))
    reference = _window.owners.get(memory)
    return reference is not None and memory in _addresses(reference())


def _addresses(parameter: Any) -> list[int]:
    """Addresses of the memory of a parameter's value and gradient."""
    tensors = () if parameter is None else (parameter, parameter.grad)
    return [memory_of(t) for t in tensors if t is not None]
