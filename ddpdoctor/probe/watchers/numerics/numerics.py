"""Is a loss, or a gradient of this rank, NaN or infinite, and does an optimizer apply it?

Looked at when a backward begins and when gradients arrive, before they are averaged. A loss that is
not finite is followed back at once, while its graph exists, but recorded only when an optimizer
steps on it, or the program stops because of it: what a GradScaler or the user's own test skips is
no fault. On a GPU nothing waits for
the device: flags are copied to the host and read at a later step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import msgspec

from ....events import NonFinite
from ....events.numerics import ROWS_RECORDED
from ...recording import hooks
from ...recording.hooks import Light, Subscriptions
from ...recording.recorder import Recorder, shielded
from ...recording.torch_compat import compiling, graph
from ...recording.watcher import Watcher, on
from ...recording.weak_references import Reference
from ...tensors.digests import finite
from ...training import lifecycle
from ...training.accumulate_grad import Captures, GradientHooks
from ...training.finite_gradients import finite_gradient, sampled_positions
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from ...training.records import Backward, Forward, Step
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from . import nonfinite_origin, nonfinite_sites, stopped_before_backward
from .device_numbers import DeviceNumbers
from .finite_gradients_of_nan_loss import FiniteGradients, leaves_gradients_finite
from .nonfinite_origin import Origin

MOST_EMITTED = 8
MOST_INPUTS = 16
ALWAYS = 128
"""First backwards whose gradients are looked at whatever it costs, for many parameters. Later ones
as the budget allows, for one parameter, and for many in one of `WHOLE_EVERY`."""

WHOLE_EVERY = 16

LASTING, LASTING_PARAMETERS = 16, 4
"""Backwards in a row without a step after which the loss is no overflow that a GradScaler can cure:
for a NaN loss, and for parameters that are not finite."""


_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""Optimizer states that average the gradient itself; others average its square, which may overflow
for finite gradients."""


_NO_FORWARD: tuple[int, Any, list[tuple[int | str, Any]]] = (-1, None, [])


class Numerics(Watcher):
    """
    Attributes:
        suspect: the non-finite loss or gradient of the last backwards, until a step applies it.
        local: a non-finite gradient of the running backward.
        spared: NaN losses with finite gradients.
        lasting: the first of several non-finite losses in a row without a step, and their number.
        on_device: losses and gradients there.
        plain: `torch.Tensor`.
        backwards: backwards whose gradients were looked at.
        returned: by model, for its last forward: torch's number of the first autograd node after
            it, a reference to the output, and references to the inputs.
        marked: models with non-finite inputs whose loss is still to come; `masked` are those whose
            loss was finite (padding, say), so that their inputs are not to blame.
    """

    lost = "where NaN and infinity come from"

    def __init__(self) -> None:
        self.suspect: NonFinite | None = None
        self.local: NonFinite | None = None
        self.spared = FiniteGradients()
        self.lasting: tuple[NonFinite | None, int] = (None, 0)
        self.hooks = GradientHooks()
        self.on_device = DeviceNumbers()
        self.emitted = 0
        self.plain: Any = None
        self.backwards = 0
        self.returned: dict[Model, tuple[int, Any, list[tuple[int | str, Any]]]] = {}
        self.marked: set[Model] = set()
        self.masked: set[Model] = set()
        self.sampled_positions: dict[Model, list[int]] = {}
        # Subscription to the end of a backward whose gradients are looked at.
        self._at_backward_end = Subscriptions()
        # Subscription to the next step, while something non-finite, or a pending flag, may be
        # applied.
        self._at_next_step = Subscriptions()

    def install(self) -> None:
        import torch

        self.plain = torch.Tensor

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        made = forward.model.forwards
        if self.emitted < MOST_EMITTED and made & (made - 1) == 0:
            given = (ref() for _, ref in self._inputs(forward))
            if not all(finite(tensor) for tensor in given):
                self.marked.add(forward.model)

    @on(lifecycle.forward_ends, light=Light.LEFT_OUT)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        if forward.grad_enabled and self.emitted < MOST_EMITTED:
            output = forward.output
            kept = Reference(output) if type(output) is self.plain else None
            self.returned[forward.model] = graph.next_number(), kept, self._inputs(forward)

    def _inputs(self, forward: Forward) -> list[tuple[int | str, Any]]:
        """Weak references to the input tensors of a forward, with their names or positions."""
        args, kwargs = forward.args, forward.kwargs
        if len(args) == 1 and not kwargs and type(args[0]) is self.plain:  # as most often
            return [(0, Reference(args[0]))]
        return [*_tensors(enumerate(args)), *_tensors(kwargs.items())]

    def _entered_after_forwards(self, origin: Origin, live: list[Model]) -> str:
        """`NonFinite.beyond`: `finite` or `gone` (the outputs of the forwards) if the value entered
        the graph as a constant after all forwards; empty if not."""
        known = [self.returned.get(model, _NO_FORWARD) for model in live]
        if not (origin.entered and known) or not all(0 <= n <= origin.number for n, _, _ in known):
            return ""
        outputs = [None if reference is None else reference() for _, reference, _ in known]
        if not all(finite(output) for output in outputs):
            return ""
        return "gone" if any(output is None for output in outputs) else "finite"

    @on(lifecycle.backward_begins, light=Light.LEFT_OUT)
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        earlier, self.suspect, self.local = self.suspect, None, None
        self.on_device.backward_begins()
        self.hooks.alone = False
        marked, self.marked = self.marked, set()
        if self.emitted >= MOST_EMITTED:
            return
        for root in backward.roots:
            if type(root) is self.plain and root.is_floating_point():
                break
        else:
            return
        one_number = root.is_cpu and root.numel() == 1  # as most losses are
        if not root.is_cpu:
            if compiling():
                return
            self._flag_later(recorder, backward, root, "loss")
        elif not (math.isfinite(root.item()) if one_number else finite(root)):
            if not compiling():
                self.suspect = _remaining(earlier) or self._diagnose(recorder, backward, root)
                self._at_next_step.enable()
                if leaves_gradients_finite(self.suspect):
                    self._watch_gradients(recorder, backward, True)
                self._emit_if_lasting(recorder, self.suspect, root)
            return
        self.lasting = None, 0
        if earlier is not None:
            self.suspect = _remaining(earlier)
        if marked and root.is_cpu:
            self.masked |= marked
        asked = recorder.every and recorder.step % recorder.every == 0
        if (asked or self.backwards < ALWAYS or recorder.affordable()) and not compiling():
            seen, self.backwards = self.backwards, self.backwards + 1
            self._watch_gradients(
                recorder, backward, asked or seen < ALWAYS or seen % WHOLE_EVERY == 0
            )

    def _emit_if_lasting(self, recorder: Recorder, suspect: NonFinite, root: Any) -> None:
        """Record a non-finite loss that persists without a step: a GradScaler keeps skipping steps
        that no smaller scale makes finite."""
        first, count = self.lasting
        overflow = suspect.kind != "parameter" and nonfinite_origin.value_in(root) == "inf"
        if overflow or (
            first is not None and (first.step, first.kind) != (suspect.step, suspect.kind)
        ):
            first, count = None, 0
        if not overflow:
            first, count = first or suspect, count + 1
            if count == (LASTING_PARAMETERS if first.kind == "parameter" else LASTING):
                emitted = msgspec.structs.replace(
                    first, total=first.step, applied=False, skipped=count
                )
                self._emit(recorder, emitted)
        self.lasting = first, count

    def _flag_later(self, recorder: Recorder, backward: Backward, value: Any, kind: str) -> None:
        event = NonFinite(
            at=time.monotonic(),
            kind=kind,
            step=recorder.step,
            value="not finite",
            site=backward.site,
        )
        if self.on_device.add(value, event):
            self._at_next_step.enable()

    def _watch_gradients(self, recorder: Recorder, backward: Backward, whole: bool) -> None:
        """Hook the gradients of one parameter of each model, or of many (`whole`), to look at them
        before DDP averages them."""
        look = shielded(
            "numerics.look", partial(self._look_at_gradient, recorder, backward, whole), self.lost
        )
        for model in WrappedModels.current.live():
            if not model.pending:
                continue
            known = self.sampled_positions.get(model)
            if known is None:
                known = self.sampled_positions[model] = sampled_positions(model)
            for position in known if whole else known[:1]:
                parameter = model.parameters[position]()
                if parameter is None or not parameter.requires_grad:  # frozen for this backward
                    continue
                self.hooks.add([(parameter, partial(look, model.names[position]))])
                self._at_backward_end.enable()
                if not parameter.is_cpu:  # every look launches kernels there: one parameter must do
                    break

    def _look_at_gradient(
        self, recorder: Recorder, backward: Backward, whole: bool, name: str, gradient: Any
    ) -> None:
        if gradient is None or Captures.depth:
            return
        if not gradient.is_cpu:
            self._flag_later(recorder, backward, gradient, "gradient")
            return
        began = time.perf_counter_ns()
        if not finite_gradient(gradient):
            if self.local is None:
                self.local = _own_gradient(recorder, backward, gradient)
            if whole:
                self.local = msgspec.structs.replace(self.local, names=(*self.local.names, name))
        recorder.own_ns += time.perf_counter_ns() - began

    @on(lifecycle.backward_ends, during="_at_backward_end")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        self._at_backward_end.disable()
        self.hooks.remove()
        if self.local is not None and self.suspect is None:
            self.suspect = self.local
            self._at_next_step.enable()

    def _diagnose(
        self,
        recorder: Recorder,
        backward: Backward | None,
        root: Any,
        holder: FrameType | None = None,
    ) -> NonFinite:
        """Find what made the loss non-finite: parameters, inputs, buffers, or else an operation.

        Args:
            backward: None where that was not reached; holder: then the function that has the loss.
        """
        live = [m for m in WrappedModels.current.live() if m.pending]
        frame = holder or recorder.sites.user_frame(sys._getframe(1))
        base = NonFinite(
            at=time.monotonic(),
            kind="loss",
            step=recorder.step,
            value=nonfinite_origin.value_in(root),
            site=-1 if backward is None else backward.site,
            backward=-1 if backward is None else backward.number,
            stopped=backward is None,
            applied=backward is not None,
            forward_site=live[0].forward_site if live else -1,
        )
        for kind, named in self._forward_state(live):
            bad = [(name, t) for name, t in named if not finite(t)]
            if bad:
                return msgspec.structs.replace(
                    base,
                    kind=kind,
                    value=nonfinite_origin.value_in(bad[0][1]),
                    names=tuple(name for name, _ in bad[:5]),
                    count=len(bad),
                    rows=_rows(bad[0][1]) if kind == "input" else (),
                    gradients=kind == "parameter" and _caused_by_gradients([t for _, t in bad]),
                    origin_site=base.forward_site if kind == "input" else -1,
                )
        origin = nonfinite_origin.trace(root, _names_by_id())
        beyond = self._entered_after_forwards(origin, live)
        returned = [self.returned.get(model, _NO_FORWARD)[0] for model in live]
        site = nonfinite_sites.site_of_origin(
            recorder, origin, live, frame, root, base.forward_site, bool(beyond), returned
        )
        return msgspec.structs.replace(
            base,
            operation=origin.operation,
            module="" if beyond else origin.module,
            names=(origin.parameter,) if origin.parameter and not beyond else (),
            entered=origin.entered,
            beyond=beyond,
            derivative_site=origin.derivative_site,
            origin_site=site,
            within=nonfinite_sites.module_at(recorder, site, live),
        )

    def _forward_state(self, live: list[Model]) -> Iterator[tuple[str, Iterable[tuple[str, Any]]]]:
        """Named tensors that the forwards started from, by kind, in the order to blame them."""
        for model in live:
            inner = model.inner()
            if inner is not None:
                yield "parameter", inner.named_parameters()
            _, _, given = (
                _NO_FORWARD if model in self.masked else self.returned.get(model, _NO_FORWARD)
            )
            inputs = [(_input_name(name), ref()) for name, ref in given]
            yield "input", [(name, tensor) for name, tensor in inputs if tensor is not None]
            if inner is not None:
                yield "buffer", _buffers_read(inner)
        if not live:  # no wrapper, or one of another kind
            held = list(Optimizers.current.parameters().values())
            names, _ = ModuleOrigins.current.named_roots(held)
            yield "parameter", [(names.get(id(p), f"parameter {n}"), p) for n, p in enumerate(held)]

    @on(lifecycle.step_begins, during="_at_next_step")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        self._read_answers(recorder)
        suspect, self.suspect = self.suspect, None
        optimizer = step.optimizer()
        applies = optimizer is not None and not _skips_itself(optimizer)
        self.on_device.step(optimizer if applies else None)
        self._at_next_step.enable(bool(self.on_device.waiting))
        if optimizer is None or not applies or suspect is None:
            return
        bad = [p for g in optimizer.param_groups for p in g["params"] if not finite(p.grad)]
        if not bad and self.local is None:
            hooks, number = self.hooks, step.number
            if (
                first := self.spared.add(suspect, hooks, step=number, total=recorder.step)
            ) is not None:
                self._emit(recorder, first)
        if bad:
            if suspect.kind == "gradient":
                known = _names_by_id()
                # Parameters are in the order of the forward, gradients arise in the reverse order:
                # the last non-finite one is nearest to the origin.
                found = suspect.names or [known[id(p)][0] for p in reversed(bad) if id(p) in known]
                suspect = msgspec.structs.replace(
                    suspect,
                    names=tuple(found[:5]),
                    count=len(bad),
                    module=found[0].rpartition(".")[0] if found else "",
                )
            self._emit(
                recorder, msgspec.structs.replace(suspect, step=step.number, total=recorder.step)
            )

    def _read_answers(self, recorder: Recorder, *, wait: bool = False) -> None:
        for event in self.on_device.found(wait=wait):
            self._emit(recorder, event)

    def _emit(self, recorder: Recorder, event: NonFinite) -> None:
        if self.emitted < MOST_EMITTED:
            self.emitted += 1
            if event.kind in ("loss", "gradient"):
                largest = nonfinite_origin.largest(Optimizers.current.parameters().values())
                event = msgspec.structs.replace(event, largest=largest)
            recorder.emit(event, vital=True)

    @on(hooks.failing)
    def _failing(
        self, recorder: Recorder, what: tuple[BaseException | None, list[FrameType]]
    ) -> None:
        error, frames = what
        pending = any(m.pending for m in self.returned)
        if not pending or self.emitted >= MOST_EMITTED or compiling():
            return
        if stopped_before_backward.own_error(recorder, error, frames):
            found = stopped_before_backward.loss_in(recorder, frames, self.plain)
            if found is not None:
                self.suspect = None
                self._emit(recorder, self._diagnose(recorder, None, *found))

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self.on_device.end()
        self._read_answers(recorder, wait=True)
        if (spared := self.spared.first) is not None and spared.spared > 1:
            recorder.emit(spared)
        if self.suspect is not None:  # the program ended before a step, or because of it
            self._emit(recorder, msgspec.structs.replace(self.suspect, applied=False))


def _tensors(named: Iterable[tuple[int | str, Any]]) -> list[tuple[int | str, Any]]:
    """Weak references to the tensors among named values and in their containers, with names."""
    found: list[tuple[int | str, Any]] = []
    for name, value in named:
        if hasattr(value, "untyped_storage"):
            found.append((name, Reference(value)))
        elif isinstance(value, dict):
            found += _tensors((str(k), v) for k, v in value.items())
        elif isinstance(value, (list, tuple)):
            found += _tensors((f"{_input_name(name)}[{n}]", v) for n, v in enumerate(value))
        if len(found) >= MOST_INPUTS:
            break
    return found


def _input_name(name: int | str) -> str:
    return name if isinstance(name, str) else f"argument {name}"


def _remaining(earlier: NonFinite | None) -> NonFinite | None:
    """The suspect of an earlier backward, if accumulated gradients are still not finite."""
    if earlier is None or all(finite(p.grad) for p in Optimizers.current.parameters().values()):
        return None
    return earlier


def _own_gradient(recorder: Recorder, backward: Backward, gradient: Any) -> NonFinite:
    return NonFinite(
        at=time.monotonic(),
        kind="gradient",
        step=recorder.step,
        value=nonfinite_origin.value_in(gradient),
        site=backward.site,
    )


def _names_by_id() -> dict[int, list[str]]:
    """All names of the wrapped models' parameters, by id."""
    found: dict[int, list[str]] = {}
    for model in WrappedModels.current.live():
        inner = model.inner()
        if inner is not None:
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), []).append(name)
    return found


def _caused_by_gradients(parameters: list[Any]) -> bool:
    """Whether optimizer states of the parameters show that non-finite gradients were applied."""
    states = [o.state.get(p) or {} for o in Optimizers.current.made() for p in parameters]
    return any(
        not finite(kept) and (key in _FIRST_MOMENTS or nonfinite_origin.value_in(kept) == "nan")
        for state in states
        for key, kept in state.items()
    )


def _buffers_read(module: Any) -> Iterator[tuple[str, Any]]:
    """Buffers that the forward may have read; BatchNorm in training mode only writes its own."""
    from torch.nn.modules.batchnorm import _NormBase

    for name, part in module.named_modules():
        if not (isinstance(part, _NormBase) and part.training):
            yield from part.named_buffers(prefix=name, recurse=False)


def _rows(tensor: Any) -> tuple[int, ...]:
    """First positions in the batch with non-finite values."""
    import torch

    if tensor.dim() == 0:
        return ()
    bad = torch.logical_not(torch.isfinite(tensor.detach())).flatten(1) if tensor.dim() > 1 else (
        torch.logical_not(torch.isfinite(tensor.detach())).unsqueeze(1)
    )  # fmt: skip
    return tuple(int(i) for i in bad.any(1).nonzero().flatten()[:ROWS_RECORDED])


def _skips_itself(optimizer: Any) -> bool:
    """Whether the optimizer is fused: GradScaler always calls those, and they skip the step on the
    device."""
    return getattr(optimizer, "found_inf", None) is not None
