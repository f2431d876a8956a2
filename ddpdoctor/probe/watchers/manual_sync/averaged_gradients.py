"""What becomes of gradients, or parameters, that the program averages manually?

A few values are recorded as they are on this rank before the exchange (gradients: as the last
backward left them) and when the next step begins, in the first steps. Whether the latter are the
mean over the ranks is computed from the records of all ranks.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Any, NamedTuple

from msgspec.structs import replace

from ....events import Averaged
from ....events.operations import operation
from ...collectives import call_hooks
from ...collectives.call_hooks import Call
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import compiled
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...source.division import divided_by_world_size, loss_divided
from ...source.line_tracer import Tracer
from ...tensors.autograd_nodes import divisor_of, means
from ...tensors.digests import digests
from ...tensors.pending_digests import SomeValues
from ...tensors.tensor_watch import grad_of, spread
from ...training import lifecycle, records
from ...training.backwards import Backwards
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from ...training.records import Backward, Step
from .clipped_gradients import on_clipping
from .exchanges import Exchanges
from .limits import (
    AVERAGE_LOOKS,
    AVERAGED_NODES,
    AVERAGED_TENSORS,
    LOSS_NODES,
    PARAMETER_LOOKS,
)
from .parallelism import IN_BACKWARD
from .unwrapped import UnwrappedParameters
from .unwrapped_inputs import UnwrappedInputs


class _LocalGradients:
    """Some gradients of one optimizer, as the last backward left them, or as they were before the
    first exchange inside it.

    Attributes:
        values: a few values of the sampled gradients when the backward ended.
        alone: nothing communicated since the step before can be in `values`.
        inside: they were taken inside the backward.
        operations: reduce operations of the collectives since (`SUM`, `AVG`), in order.
        clipped: the last clipping by torch since the exchange; None if there was none.
    """

    def __init__(
        self, parameters: list[Any], tracer: Tracer | None, *, alone: bool, inside: bool = False
    ) -> None:
        self.values = SomeValues([p.grad for p in parameters])
        self.alone = alone
        self.inside = inside
        self.operations: dict[str, None] = {}
        self.tracer = tracer
        self.clipped: _Clip | None = None


class _Clip(NamedTuple):
    """Values of the sampled gradients before torch clips them for the first time after an exchange.

    Attributes:
        mark: the exchanges until then (`Exchanges.tensors_exchanged`).
        site: the line that clips.
    """

    values: SomeValues
    mark: tuple[int, int]
    site: int


class AveragedGradients(Watcher):
    """
    Attributes:
        looks: by optimizer, steps recorded so far.
        local: by optimizer, its gradients since the last backward.
        loss: the site of a line that divides the loss by the world size, and the divisor as
            written there; (-1, "") if none.
        backward_site: the line of the last backward.
        means: of each backward since the last step, as in `Averaged`.
        alone: optimizers since whose last step no call brought values of other ranks.
        parameters: by optimizer that exchanges its parameters, the window (`Exchanges`) in which
            they were last looked at, their values before the exchange, and its line.
        looks_at_parameters: by optimizer, how often parameters were looked at.
        pending: events whose values (local, applied, unclipped) may still be on their way from a
            device.
    """

    lost = "gradients that are averaged manually"
    after = (Exchanges,)  # records what the program exchanges itself

    def __init__(self) -> None:
        self.looks: dict[int, int] = {}
        self.local: dict[int, _LocalGradients] = {}
        self.loss: tuple[int, str] = (-1, "")
        self.backward_site = -1
        self.means: list[tuple[float, ...]] = []
        self.alone: set[int] = set()
        self.parameters: dict[int, tuple[int, SomeValues, int]] = {}
        self.looks_at_parameters: dict[int, int] = {}
        self.pending: list[tuple[Averaged, SomeValues, SomeValues, SomeValues]] = []
        self._looking = Subscriptions()
        self._exchanging = Subscriptions()

    def install(self) -> None:
        on_clipping(self, self._clips)

    def _still_examined(self, known: records.Optimizer) -> UnwrappedParameters | None:
        unwrapped = known.notes.get(UnwrappedParameters)
        by_hand = unwrapped is not None and unwrapped.exchanged in ("gradients", IN_BACKWARD)
        return unwrapped if by_hand and self.looks.get(known.number, 0) < AVERAGE_LOOKS else None

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        if self._still_examined(step.known) is not None:
            self._looking.enable()
        if self._exchanged_parameters(step.known) is not None:
            self._exchanging.enable()

    def _exchanged_parameters(self, known: records.Optimizer) -> UnwrappedParameters | None:
        """The parameters of an optimizer, where the program exchanges them and they were not looked
        at often enough."""
        unwrapped = known.notes.get(UnwrappedParameters)
        exchanged = unwrapped is not None and unwrapped.exchanged == "parameters"
        enough = (
            self.looks.get(known.number, 0) >= AVERAGE_LOOKS
            or self.looks_at_parameters.get(known.number, 0) >= PARAMETER_LOOKS
        )
        return unwrapped if exchanged and not enough else None

    @on(call_hooks.called, during="_exchanging")
    def _exchange_called(self, recorder: Recorder, call: Call) -> None:
        """Keep a few values of the parameters before the first call of a window that may exchange
        them."""
        if not any(t.is_floating_point() and t.numel() > 1 for t in call.tensors):
            return
        window = Exchanges.current.window_elements()[0]
        for known in Optimizers.current.known():
            unwrapped = self._exchanged_parameters(known)
            if unwrapped is None or self.parameters.get(known.number, (-1,))[0] == window:
                continue
            looked = self.looks_at_parameters.get(known.number, 0)
            self.looks_at_parameters[known.number] = looked + 1
            values = SomeValues(_spread_parameters(unwrapped))
            self.parameters[known.number] = window, values, recorder.site()

    @on(lifecycle.step_begins, during="_exchanging")
    def _exchange_over(self, recorder: Recorder, step: Step) -> None:
        number = step.known.number
        unwrapped = self._exchanged_parameters(step.known)
        if (seen := self.parameters.pop(number, None)) is None or unwrapped is None:
            return
        _, local, site = seen
        event = Averaged(
            at=time.monotonic(),
            optimizer=number,
            step=step.number,
            local=(),
            applied=(),
            site=site,
            kind="parameters",
        )
        values = SomeValues(_spread_parameters(unwrapped))
        self.pending.append((event, local, values, SomeValues([])))
        self._record_arrived(recorder)
        if not any(self._exchanged_parameters(known) for known in Optimizers.current.known()):
            self._exchanging.disable()

    @on(lifecycle.backward_begins, during="_looking")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        """Look for a line that divides the loss by the world size: then a sum is already a mean."""
        import torch.distributed as dist

        for number in [n for n, local in self.local.items() if local.inside]:
            self._forget(number)
        self.loss, self.backward_site = (-1, ""), backward.site
        roots = [node for r in backward.roots if (node := getattr(r, "grad_fn", None)) is not None]
        self.means.append(means(roots[0], LOSS_NODES) if len(roots) == 1 else ())
        node = getattr(backward.roots[0], "grad_fn", None) if len(backward.roots) == 1 else None
        divided, size = False, dist.get_world_size()
        for _ in range(AVERAGED_NODES):
            if node is None:
                break
            divisor = divisor_of(node)
            if abs(divisor * size - 1) < 1e-6:
                return  # the loss is multiplied by the world size too: the two cancel out
            divided |= divisor == size
            ahead = [n for n, _ in node.next_functions if n is not None]
            node = ahead[0] if len(ahead) == 1 else None
        if divided and backward.frame is not None:
            code = backward.frame.f_code
            line, written = loss_divided(code, backward.frame.f_lineno)
            if written:
                self.loss = recorder.sites.number(code, line), written

    @on(lifecycle.backward_ends, during="_looking")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        for known in Optimizers.current.known():
            unwrapped = self._still_examined(known)
            inside = known.number in self.local and self.local[known.number].inside
            if unwrapped is None or inside:
                continue
            self._forget(known.number)
            parameters = _sampled_parameters(unwrapped)
            if parameters and backward.error is None:
                follow = self.looks.get(known.number)
                traced = (
                    follow
                    and parameters[0].is_cpu
                    and not compiled(ModuleOrigins.current.living_modules())
                )
                tracer = _trace(recorder, parameters[0]) if traced else None
                alone = known.number in self.alone
                self.local[known.number] = _LocalGradients(parameters, tracer, alone=alone)

    @on(call_hooks.called, during="_looking")
    def _called(self, recorder: Recorder, call: Call) -> None:
        kind = operation(call.op)
        large = any(t.is_floating_point() and t.numel() > 1 for t in call.tensors)
        if large and Backwards.current.running():
            self._exchange_in_backward()
        if (kind.receives or not kind.spreads) and (kind.objects or large):
            self.alone.clear()
        for local in self.local.values():
            local.operations[call.reduces_by] = None

    def _exchange_in_backward(self) -> None:
        """A backward is about to exchange, in a callback at its end, perhaps."""
        for known in Optimizers.current.known():
            unwrapped, number = self._still_examined(known), known.number
            held = number in self.local and self.local[number].inside
            if held or unwrapped is None or unwrapped.exchanged != IN_BACKWARD:
                continue
            parameters = _sampled_parameters(unwrapped)
            if parameters:
                self._forget(number)
                alone = number in self.alone
                local = _LocalGradients(parameters, None, alone=alone, inside=True)
                self.local[number] = local

    def _clips(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not (self.local and Exchanges.current.in_or_after_backward()):
            return
        mark = Exchanges.current.tensors_exchanged()
        for known in Optimizers.current.known():
            local, unwrapped = self.local.get(known.number), self._still_examined(known)
            if local is None or unwrapped is None or (local.clipped and local.clipped.mark == mark):
                continue
            values = SomeValues([p.grad for p in _sampled_parameters(unwrapped)])
            local.clipped = _Clip(values, mark, recorder.site())

    @on(lifecycle.step_begins, during="_looking")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        number = step.known.number
        local, unwrapped = self.local.get(number), self._still_examined(step.known)
        seen = UnwrappedInputs.current.pop(number)
        if unwrapped is not None:
            self.alone.add(number)
            UnwrappedInputs.current.watch(number, _sampled_parameters(unwrapped))
        if local is None or unwrapped is None:
            return
        losses, self.means = self.means, []
        lines = local.tracer.stop() if local.tracer is not None else []
        local.tracer = None
        self._forget(number)
        self.looks[number] = self.looks.get(number, 0) + 1
        if _all_exchanged(unwrapped, inside=local.inside) and not step.closure:
            event = Averaged(
                at=time.monotonic(),
                optimizer=number,
                step=step.number,
                local=(),
                applied=(),
                operations=tuple(local.operations),
                sites=tuple(recorder.sites.number(*line) for line in lines),
                divisors=tuple(divided_by_world_size(c.co_filename, n) for c, n in lines),
                loss_site=self.loss[0],
                loss_divisor=self.loss[1],
                backward_site=self.backward_site,
                alone=local.alone,
                means=losses[-1] if losses and all(losses) else (),
                **seen._asdict(),
            )
            applied = SomeValues([p.grad for p in _sampled_parameters(unwrapped)])
            unclipped = SomeValues([])
            clip = local.clipped
            if clip is not None and clip.mark == Exchanges.current.tensors_exchanged():
                unclipped, event = clip.values, replace(event, clip_site=clip.site)
            self.pending.append((event, local.values, applied, unclipped))
        self._record_arrived(recorder)
        if not any(self._still_examined(known) for known in Optimizers.current.known()):
            self._looking.disable()
            UnwrappedInputs.current.stop()

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        self._record_arrived(recorder)

    @on(hooks.leaving, lost="what becomes of averaged values at the end")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._record_arrived(recorder, wait=True)

    def _record_arrived(self, recorder: Recorder, *, wait: bool = False) -> None:
        """Record what has come from the device, in order."""
        while self.pending:
            event, local, applied, unclipped = self.pending[0]
            if not all([values.ready(wait=wait) for values in (local, applied, unclipped)]):
                return
            del self.pending[0]
            before, after = tuple(local.values), tuple(applied.values)
            if not before or len(before) != len(after) or not all(map(isfinite, before + after)):
                continue
            if event.kind == "parameters":
                if before == after:
                    continue  # nothing was exchanged in this window
                self.looks[event.optimizer] = self.looks.get(event.optimizer, 0) + 1
            there = tuple(unclipped.values)
            recorder.emit(replace(event, local=before, applied=after, unclipped=there))

    def _forget(self, number: int) -> None:
        local = self.local.pop(number, None)
        if local is not None and local.tracer is not None:
            local.tracer.stop()


def _all_exchanged(unwrapped: UnwrappedParameters, *, inside: bool) -> bool:
    """Whether the program exchanged all gradients since the last step."""
    every = [ref() for ref in unwrapped.parameters]
    return Exchanges.current.all_passed_in_backward(every) if inside else unwrapped.passed.every


def _sampled_parameters(unwrapped: UnwrappedParameters) -> list[Any]:
    alive = [p for ref in unwrapped.parameters if (p := ref()) is not None and p.grad is not None]
    return spread(alive, AVERAGED_TENSORS)


def _spread_parameters(unwrapped: UnwrappedParameters) -> list[Any]:
    alive = [p for ref in unwrapped.parameters if (p := ref()) is not None]
    return spread(alive, AVERAGED_TENSORS)


def _trace(recorder: Recorder, parameter: Any) -> Tracer | None:
    reference = Reference(parameter)

    def number() -> int:
        return digests([grad_of(reference())])[0]

    return Tracer.start(recorder, "gradients", number)
