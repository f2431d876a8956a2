"""Which gradients or parameters does the program itself pass to collectives?

Every call is looked at when it is made. What it carries is assigned to the step around it, by
whether a backward has ended since the last step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ....events.operations import operation
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...collectives.call_origin import of_fsdp
from ...collectives.process_groups import ProcessGroups
from ...recording.hooks import Light, Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import sequence_number
from ...recording.watcher import Watcher, on
from ...recording.weak_references import Reference
from ...tensors.collective_payload import Exchange, PassedGradients, covers, memory_of
from ...tensors.flat_layout import PACKED
from ...tensors.limits import ENOUGH_PASSED, FLAT
from ...training import lifecycle
from ...training.backwards import Backwards
from ...training.optimizers import Optimizers
from ...training.records import Backward, Step
from ...training.steady_state import steady_state
from ...training.wrapped_models import WrappedModels
from . import parallelism
from .flat_gradients import FlatGradients
from .limits import EXCHANGES_KEPT, SITES_KNOWN
from .parallelism import Parallelism


class Exchanges(Watcher):
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

    lost = "gradients that are synchronised manually"
    after = (FlatGradients,)  # knows how a flat tensor holds gradients

    def __init__(self) -> None:
        self.recent: list[Exchange] = []
        self.earlier: list[Exchange] = []
        self.in_averaging_hooks: list[Exchange] = []
        self.in_backward: list[Exchange] = []
        self.hooks: set[bool] = set()
        self.spared = False
        self.stepped, self.elements, self.numbers_passed = False, 0, 0
        self._numbers_by_group: Counter[int] = Counter()
        self.site, self.calls = -1, 0
        self.uncounted = False
        self.sequence = -1
        self.latest: tuple[Exchange, ...] = ()
        self.number = self.maybe_parameters = 0
        self.applied: dict[int, Reference] = {}
        self.late: set[int] = set()
        self.autograd_grad_step = -1
        self.owners: dict[int, Reference] | None = None
        # Subscriptions to the ends of backwards and steps; enabled while the window has
        # exchanges.
        self._following = Subscriptions()

    def _begin_window(self) -> None:
        """Start the next window if a step has ended this one."""
        if self.stepped:
            self.recent, self.earlier = [], []
            self.in_averaging_hooks, self.in_backward = [], []
            self.stepped = False
            self.late = set()
            self.number, self.maybe_parameters = self.number + 1, 0

    @on(call_hooks.called)
    def _called(self, recorder: Recorder, call: Call) -> None:
        self._following.enable()
        self._begin_window()
        self.latest = ()
        size = sum([tensor.numel() for tensor in call.tensors])
        self.numbers_passed += size
        self._numbers_by_group[call.group] += size
        kind = operation(call.op)
        if call.p2p:
            Parallelism.current.seen(parallelism.POINT_TO_POINT, call.peers)
        elif call.group == 0:
            self.calls += 1
            # torch builds these of several collectives, which its sequence number counts one by
            # one.
            self.uncounted |= kind.objects or kind.meets
        if not call.carries_values:
            return
        inside = Backwards.current.running()
        after_backward = (
            Backwards.current.since(recorder.step) or self.autograd_grad_step == recorder.step
        )
        kept = self.recent if after_backward else self.earlier
        if inside and self.hooks == {True}:
            kept = self.in_averaging_hooks
        if (after_backward or inside) and recorder.step < SITES_KNOWN:
            self.site = recorder.site()
        amid = self._backward_pending(
            recorder.step
        )  # then the tensors may be a model's input or output
        for tensor in call.tensors:
            if len(kept) < EXCHANGES_KEPT and tensor.is_floating_point():
                memory = memory_of(tensor)
                size = tensor.numel()
                layout = FlatGradients.current.layouts.get(size, "") if after_backward else ""
                sort = call.gathers, amid or tensor.requires_grad, layout
                exchange = Exchange(call.group, size, memory, *sort)
                self.latest += (exchange,)
                if not (after_backward or inside) and (late := self._applied_parameter(memory)):
                    self.late.add(late)
                    continue
                kept.append(exchange)
                known = amid or (inside and self.hooks == {True})
                self.maybe_parameters += 0 if known else tensor.numel()
                self.elements += tensor.numel() if recorder.step else 0
                if call.op.startswith("all_to_all"):
                    Parallelism.current.seen(
                        parallelism.ALL_TO_ALL, ProcessGroups.current.other_members(call.group)
                    )
                    if tensor is call.tensors[0]:
                        Parallelism.current.all_to_all_called(inside=inside)
                elif inside and not of_fsdp():
                    Parallelism.current.seen(
                        parallelism.IN_BACKWARD, ProcessGroups.current.other_members(call.group)
                    )
                    self.in_backward.append(exchange)

    def _backward_pending(self, step: int) -> bool:
        """Whether a backward runs, or a forward of this step still waits for its backward.

        A backward does not count while a communication hook might exchange parameters in it.
        """
        if Backwards.current.running():
            return not self.hooks or self.spared
        return any(m.pending and m.forward_step == step for m in WrappedModels.current.live())

    def autograd_grad_called(self, recorder: Recorder, inputs: Iterable[Any]) -> None:
        """Note a `torch.autograd.grad` with respect to `inputs`.

        With respect to parameters it yields gradients without a backward: exchanges that follow are
        counted as if after one.
        """
        from torch.nn import Parameter

        if not Backwards.current.running() and any(isinstance(t, Parameter) for t in inputs):
            self._begin_window()
            self.autograd_grad_step = recorder.step

    @on(lifecycle.backward_ends, during="_following", enabled=True, light=Light.CALLED)
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        self._begin_window()
        self.applied = {}
        self.owners = None  # a backward may have replaced the gradients
        self.earlier += self.recent
        self.recent = []
        if self.earlier:
            steady_state.observe_next_step()

    @on(lifecycle.step_ends, during="_following", enabled=True, light=Light.CALLED)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        self.stepped = True
        self.uncounted, self.calls = False, 0
        # Only `unrecorded_collectives` reads it, and only programs without a wrapper call that.
        self.sequence = -1 if WrappedModels.current.live() else sequence_number(_world())
        if WrappedModels.current.live():
            self._begin_window()
            self._following.disable()

    def latest_exchanges(self) -> tuple[Exchange, ...]:
        """The floating-point tensors of the last call."""
        return self.latest

    def unrecorded_collectives(self) -> bool:
        """Whether torch counts more collectives on the default group since the last step than the
        probe recorded (a C++ extension, say)."""
        known = self.sequence >= 0 and not self.uncounted
        return known and sequence_number(_world()) - self.sequence > self.calls

    def hook_seen(self, averages: bool) -> None:
        """Register a model's communication hook; `averages`: it is known to average gradients."""
        self.hooks.add(averages)

    def hooks_spare_parameters(self) -> None:
        """Trust unknown hooks: in several steps their exchanges left the parameters unchanged."""
        self.spared = True

    def in_comm_hook(self) -> bool:
        """Whether the collective about to be made comes from a communication hook of DDP that may
        exchange parameters."""
        if self.spared or False not in self.hooks or not Backwards.current.running():
            return False
        self._begin_window()
        return True

    def only_in_hooks(self) -> bool:
        """Whether every exchange since the last step was made by DDP's communication hooks."""
        every = [*self.recent, *self.earlier]
        return bool(every and self.hooks) and len(every) == len(self.in_backward)

    def in_smaller_groups(self, ranks: Sequence[int]) -> bool:
        """Whether DDP's hooks exchanged since the last step in proper subgroups of `ranks` only."""
        reached = [
            len(ProcessGroups.current.other_members(one.group)) + 1 for one in self.in_backward
        ]
        return self.only_in_hooks() and all(1 < size < len(ranks) for size in reached)

    def window_elements(self) -> tuple[int, int]:
        """The number of this window, and how many elements exchanged in it may be parameters."""
        return self.number, self.maybe_parameters

    def before_backward(self) -> bool:
        """Whether anything was exchanged between the last step and the last backward."""
        return bool(self.earlier)

    def parameters_exchanged(self, parameters: Sequence[Any]) -> bool:
        """Whether collectives between the last step and the end of the last backward carried these
        parameters, not their gradients."""
        if not self.earlier:
            return False
        gradients = {memory_of(p.grad) for p in parameters if p.grad is not None}
        own = {memory_of(p) for p in parameters}
        kept = [e for e in self.earlier if e.memory in own or not e.amid]
        return covers([e for e in kept if e.memory not in gradients], parameters)

    def gradients_exchanged(self, parameters: Sequence[Any]) -> bool:
        """Whether the gradients of these parameters were passed to collectives since the
        backward."""
        return covers(self.recent, [p.grad for p in parameters if p.grad is not None])

    def gradients_passed(self, parameters: Sequence[Any]) -> PassedGradients:
        """Which gradients of these parameters were passed to collectives since the backward.

        The group is -1 if its ranks also do what replicas do not do. Parameters may be None.
        """
        found = self._passed(self.recent, parameters)
        return (
            found if Parallelism.current.holds_replicas(found.group) else found._replace(group=-1)
        )

    def all_passed_in_backward(self, parameters: Sequence[Any]) -> bool:
        """Whether collectives inside the backward carried all gradients of these parameters and
        little else, as hooks on parameters do. Tensor parallelism, for one, carries activations
        too."""
        sizes = [p.grad.numel() for p in parameters if p is not None and p.grad is not None]
        if sum(e.elements for e in self.in_backward) > FLAT[1] * sum(sizes):
            return False
        return (
            Parallelism.current.special == parallelism.IN_BACKWARD
            and self._passed(self.in_backward, parameters).every
        )

    def elements_in_backward(self) -> int:
        """Elements passed to collectives inside backwards since the last step."""
        return sum(e.elements for e in self.in_backward)

    def _passed(self, exchanges: list[Exchange], parameters: Sequence[Any]) -> PassedGradients:
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
        for exchange in self._without_other_optimizers(exchanges, {*own, *held}):
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
        whole = (
            emitted == total or total - emitted <= other <= total - emitted + (FLAT[1] - 1) * total
        )
        most = bool(total) and emitted + flat >= ENOUGH_PASSED * total
        flat_ones = [e for e in exchanges if e.layout and e.memory not in own]
        if total and flat_ones:
            whole = most = True
            found, places = list(gradients), sum(e.elements for e in flat_ones)
            other = 0 if any(e.layout == PACKED for e in flat_ones) else max(0, places - total)
        group = used.pop() if total and whole and len(used) == 1 else -1
        return PassedGradients(tuple(found), other, group, most)

    def gradients_applied(self, parameters: Sequence[Reference]) -> bool:
        """Note that a step is about to apply the gradients of these parameters.

        Returns whether gradients of the step before were passed to collectives only after that
        step."""
        late = False
        for reference in parameters:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self.applied[memory_of(parameter.grad)] = reference
                late |= id(parameter) in self.late
        return late

    def _applied_parameter(self, memory: int) -> int:
        """Identity of the parameter whose applied gradient still lies at `memory`; 0 if none."""
        reference = self.applied.get(memory)
        parameter = None if reference is None else reference()
        gradient = None if parameter is None else parameter.grad
        there = gradient is not None and memory_of(gradient) == memory
        return id(parameter) if there else 0

    def parameters_averaged(self, parameters: Sequence[Any]) -> bool:
        """Whether collectives since the last step carried the parameters themselves."""
        if self.parameters_exchanged(parameters):
            return True
        if not self.recent:
            return False
        own = {memory_of(p) for p in parameters}
        return any(e.memory in own for e in self.recent)

    def all_parameters_averaged(self, parameters: Sequence[Any]) -> bool:
        """Whether collectives between the last step and the last backward carried all of these
        parameters, not gathered."""
        total = sum(p.numel() for p in parameters)
        reduced = sum(e.elements for e in self.earlier if not e.gathered)
        return reduced >= total and self.parameters_exchanged(parameters)

    def elements_after_first_step(self) -> int:
        """Floating-point numbers passed to collectives since the first step."""
        return self.elements

    def numbers_by_group(self) -> dict[int, int]:
        """`numbers_passed`, by the number of the process group."""
        return dict(self._numbers_by_group)

    def group_of_parameters(self, parameters: Sequence[Any]) -> int:
        """The one group in which all these parameters (no copies) were exchanged since the last
        step; -1 if there is none."""
        sizes = {memory_of(p): p.numel() for p in parameters}
        every = [e for e in (*self.recent, *self.earlier) if sizes.get(e.memory) == e.elements]
        groups = {e.group for e in every if not e.gathered}
        whole = len(groups) == 1 and sizes.keys() == {e.memory for e in every}
        return groups.pop() if whole else -1

    def mark(self) -> tuple[int, int]:
        """A moment, for `all_carried_since`."""
        return self.number, len(self.earlier) + len(self.recent)

    def tensors_exchanged(self) -> tuple[int, int]:
        """A moment, too, at which single numbers do not count: losses and norms for a log."""
        return self.number, sum(e.elements > 1 for e in (*self.earlier, *self.recent))

    def in_or_after_backward(self) -> bool:
        """Whether anything was exchanged since the last backward began."""
        return bool(self.recent or self.in_backward)

    def all_carried_since(self, mark: tuple[int, int], parameters: Sequence[Any]) -> bool:
        """Whether collectives carried all these parameters themselves since a moment, as far as no
        step has ended in between."""
        number, count = mark
        since = [*self.earlier, *self.recent][count:] if number == self.number else []
        return {memory_of(p) for p in parameters} <= {e.memory for e in since if not e.gathered}

    def enough_for(self, parameters: Sequence[Any], since: int) -> bool:
        """Whether enough numbers were exchanged since `numbers_passed()` was `since` to synchronise
        these parameters, in whatever form."""
        new = self.numbers_passed - since
        return bool(new) and new >= ENOUGH_PASSED * sum(p.numel() for p in parameters)

    def exchange_site(self) -> int:
        """Site of an exchange during a backward or between backward and step; -1 if the first steps
        had none."""
        return self.site

    def gradient_groups(self) -> set[int]:
        """Numbers of the groups used since the last backward."""
        return {e.group for e in self.recent}

    def values_exchanged(self, parameters: Sequence[Any], *, gathered: bool = True) -> bool:
        """Whether collectives since the last step carried these parameters, or tensors of their
        sizes.

        Args:
            gathered: count collectives that only gather, and so leave the parameters unchanged.
        """
        every = [*self.recent, *self.earlier, *self.in_averaging_hooks]
        every = [e for e in every if not e.layout and (gathered or not e.gathered)]
        if not covers(every, parameters):
            return False
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = {memory_of(t) for t in (*parameters, *gradients)}
        return covers(self._without_other_optimizers(every, own), parameters)

    def no_step_follows(self) -> None:
        """End the window of the last step at the end of the run."""
        self._begin_window()

    def _without_other_optimizers(self, exchanges: list[Exchange], own: set[int]) -> list[Exchange]:
        """Drop exchanges of values and gradients of parameters of other optimizers."""
        return [e for e in exchanges if e.memory in own or not self._belongs_to_optimizer(e.memory)]

    def _belongs_to_optimizer(self, memory: int) -> bool:
        """Whether the value or gradient of a parameter of any optimizer lies at `memory`."""
        if self.owners is None:
            self.owners = {}
            for parameter in Optimizers.current.parameters().values():
                owner = Reference(parameter)
                self.owners.update((place, owner) for place in _addresses(parameter))
        reference = self.owners.get(memory)
        return reference is not None and memory in _addresses(reference())


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_initialized() else None


def _addresses(parameter: Any) -> list[int]:
    """Addresses of the memory of a parameter's value and gradient."""
    tensors = () if parameter is None else (parameter, parameter.grad)
    return [memory_of(t) for t in tensors if t is not None]
