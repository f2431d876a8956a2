"""Are the modules outside of every wrapper that take part in training equal on all ranks?

A target or teacher network, a loss with buffers, a normaliser: DDP does not know them. They are
found by a global forward hook during two short stretches of training, and digested from then on
before some optimizer steps and at the end; and once before the first step, when it is not known yet
which of the program's modules these are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from ....events import OuterDigests, OuterModule, OuterStateTaken, Place
from ....events.drift import AT_END, AT_START, full
from ....events.pack import pack
from ...collectives.process_groups import ProcessGroups
from ...recording import hooks
from ...recording.devices import hands_off
from ...recording.hooks import Subscriptions
from ...recording.patching import on_restore
from ...recording.recorder import Recorder, current_recorder, guarded, shielded
from ...recording.torch_compat import compiles
from ...recording.watcher import Args, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...source.call_resolver import places_of
from ...source.parameter_writes import update_in_frames
from ...tensors.digests import readable, sums, writes_a_block
from ...tensors.pending_digests import Arrivals, Waiting
from ...training import lifecycle
from ...training.forwards import Forwards
from ...training.module_origins import ModuleOrigins
from ...training.optimizers import Optimizers
from ...training.records import Forward, Loading, Step
from ...training.wrapped_models import WrappedModels
from .limits import (
    OUTER_CALLED,
    OUTER_COPIED,
    OUTER_ELEMENTS,
    OUTER_EVALUATED,
    OUTER_EVALUATIONS,
    OUTER_LOOKED_AT,
    OUTER_MODULES,
    OUTER_STATES,
    OUTER_TENSORS,
)


class _Called:
    """A module that was called outside of every wrapper's forward.

    Attributes:
        site: the line of the first call.
        learning, feeds: as of `OuterModule`.
    """

    def __init__(self, module: Any, site: int) -> None:
        self.reference = Reference(module)
        self.site = site
        self.learning = False
        self.feeds = False


class _AtStart:
    """The tensors of the outermost modules outside of wrappers before the first optimizer step.

    Attributes:
        at: when they were digested.
    """

    def __init__(self) -> None:
        wrapped = _wrapped_modules()
        tensors: dict[int, Any] = {}
        for module in ModuleOrigins.current.outermost():
            found = _own_tensors(module, wrapped)
            mine = [] if found is None else [t for _, t in (*found[0], *found[1])]
            if len(tensors) + len(mine) <= OUTER_TENSORS:
                tensors |= {id(tensor): tensor for tensor in mine}
        self.at = time.monotonic()
        self.known = {i: (Reference(t), n) for n, (i, t) in enumerate(tensors.items())}
        self.waiting = Waiting(sums(tensors.values())[0])

    def digests(self, tensors: list[Any]) -> list[int] | None:
        """Those of these tensors; None where some are new or have not arrived."""
        places = [self.known.get(id(tensor), (None, 0)) for tensor in tensors]
        if not all(r is not None and r() is t for (r, _), t in zip(places, tensors, strict=True)):
            return None
        return [self.waiting.values[n] for _, n in places] if self.waiting.ready() else None


class OuterModules(Watcher):
    """
    Attributes:
        at_start: None before the first optimizer step.
        handle: of the global forward hook, None while nobody looks.
        awaited: id of a module outside of wrappers that is in evaluation mode and not called yet;
            0 in a training step. `evaluations` were waited for so far.
        called: what it has seen, by id.
        returned: by id, a tensor without gradient that a module returned, and the module's id.
        until: optimizer steps of the process at which to stop looking.
        optimizer: number of the one before whose steps modules are digested.
        known: modules that were recorded.
        taken: how often the state of each was taken.
        evaluating: of a global hook that waits for an evaluation to call known modules; None for
            none. `evaluated` are those that were called since, `evaluated_at` the step, and
            `evaluations_seen` how many were waited for.
        copies: by module, its buffers before the step that runs, to see what it writes; `copied`
            the modules of which this was asked, `searched` those whose update was searched for.
    """

    lost = "modules outside of the wrapped models"

    def __init__(self) -> None:
        self.at_start: _AtStart | None = None
        self.handle: Any = None
        self.awaited = self.evaluations = 0
        self.called: dict[int, _Called] = {}
        self.returned: dict[int, tuple[Reference, int]] = {}
        self.until = 0
        self.optimizer = -1
        self.known: list[Reference] = []
        self.taken: dict[int, int] = {}
        self.evaluating: Any = None
        self.evaluated: set[int] = set()
        self.evaluated_at = -1
        self.evaluations_seen = 0
        self.copies: dict[int, list[Any]] = {}
        self.copied: set[int] = set()
        self.searched: set[int] = set()
        self.waiting: Arrivals[OuterDigests] = Arrivals()
        self.looking = Subscriptions()

    def install(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d
        import torch.nn

        self.around((c10d, dist), "destroy_process_group", before=self._destroying)
        self.around(torch.nn.Module, "state_dict", before=self._state_taken)
        self.around(torch.nn.Module, "eval", before=self._eval_called)
        on_restore(self._close)

    # --- which modules -------------------------------------------------------------------

    @on(lifecycle.step_ends, fast_path=False)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        if self.handle is not None:
            if recorder.step >= self.until:
                self._close()
                self._record_modules(recorder)
        elif recorder.step in OUTER_LOOKED_AT:
            # Programs with several optimizers take turns.
            self._open(recorder.step + 2 * Optimizers.current.count)

    def _eval_called(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        """A copy of the weights that is evaluated: wait for its first call."""
        module = args[0]
        if self.handle is not None or not recorder.step or self.evaluations >= OUTER_EVALUATIONS:
            return
        if id(module) in _wrapped_modules() or any(known() is module for known in self.known):
            return
        if _part_like(module) is not None:
            self.evaluations += 1
            self._open(recorder.step + 1)
            self.awaited = id(module)

    def _open(self, until: int) -> None:
        import torch.nn

        if ProcessGroups.current.exist() and not compiles():
            self.until, self.awaited = until, 0
            register = torch.nn.modules.module.register_module_forward_hook
            self.handle = register(shielded("outer modules", self._returns, self.lost))
            self.looking.enable()

    def _close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.remove()
            self.looking.disable()
        self._end_evaluation()

    def _returns(self, module: Any, args: Any, output: Any) -> None:
        recorder = current_recorder()
        if self.awaited and id(module) != self.awaited:
            return
        if recorder is None or Forwards.current.running() or len(self.called) >= OUTER_CALLED:
            return
        known = self.called.get(id(module))
        if known is None or known.reference() is not module:
            known = self.called[id(module)] = _Called(module, recorder.site())
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                known.learning = True
            else:
                self.returned[id(tensor)] = Reference(tensor), id(module)
        if self.awaited:
            self._close()
            guarded("outer modules", self._record_modules, lost=self.lost)

    @on(lifecycle.forward_begins, during="looking")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        if not forward.grad_enabled:
            return
        for value in (*forward.args, *forward.kwargs.values()):
            reference, module = self.returned.get(id(value), (None, 0))
            if reference is not None and reference() is value and module in self.called:
                self.called[module].feeds = True

    def _record_modules(self, recorder: Recorder) -> None:
        called, self.called = self.called, {}
        self.returned.clear()
        modules = {id(m): (m, one) for one in called.values() if (m := one.reference()) is not None}
        inner = {id(p) for m, _ in modules.values() for p in m.modules() if p is not m}
        wrapped = _wrapped_modules()
        for number, (module, one) in modules.items():
            known = any(reference() is module for reference in self.known)
            if number in inner or known or len(self.known) >= OUTER_MODULES:
                continue
            found = _own_tensors(module, wrapped)
            if found is None or not 0 < len(found[0]) + len(found[1]) <= OUTER_TENSORS:
                continue
            parameters, buffers, trained = found
            copied = ModuleOrigins.current.copied(module)
            site, at = copied or (ModuleOrigins.current.origin_site(module), 0.0)
            self.optimizer = max(0, self.optimizer)
            recorder.emit(
                OuterModule(
                    at=time.monotonic(),
                    number=len(self.known),
                    kind=type(module).__name__,
                    site=site,
                    call_site=one.site,
                    names=tuple(name for name, _ in (*parameters, *buffers)),
                    shapes=tuple(tuple(t.shape) for _, t in (*parameters, *buffers)),
                    parameters=len(parameters),
                    step=recorder.step,
                    copied=copied is not None,
                    made_at=at,
                    owners=tuple(_made(module, name) for name, _ in (*parameters, *buffers)),
                    trained=trained,
                    evaluated=self.awaited > 0,
                    learning=one.learning,
                    feeds=one.feeds,
                    like=_part_like(module),
                )
            )
            tensors = [tensor for _, tensor in (*parameters, *buffers)]
            if self.at_start is not None and (values := self.at_start.digests(tensors)) is not None:
                recorder.emit(
                    OuterDigests(
                        at=self.at_start.at,
                        module=len(self.known),
                        optimizer=self.optimizer,
                        step=AT_START,
                        values=pack(values),
                    )
                )
            self.known.append(Reference(module))

    # --- whether they are equal ----------------------------------------------------------

    @on(lifecycle.step_begins, fast_path=False)
    @on(lifecycle.fast_step_due)
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        if self.at_start is None and ProcessGroups.current.exist() and not hands_off():
            self.at_start = _AtStart()
        if not self.known:
            return
        self._write(recorder)
        if step.known.number == self.optimizer and (self.copies or full(step.number)):
            self._digest(recorder, step.number)
            self._write(recorder)

    @on(lifecycle.loading_begins, fast_path=False)
    def _loading_begins(self, recorder: Recorder, loading: Loading) -> None:
        """A batch is loaded without gradients: an evaluation, which may call known modules."""
        import torch

        if not self.known:
            return
        if torch.is_grad_enabled():
            self._end_evaluation()
        elif self.evaluated_at != recorder.step and self.evaluations_seen < OUTER_EVALUATED:
            self.evaluated_at = recorder.step
            self.evaluations_seen += 1
            self.evaluated.clear()
            if self.evaluating is None and not compiles():
                register = torch.nn.modules.module.register_module_forward_pre_hook
                called = shielded("outer modules", self._called_in_evaluation, self.lost)
                self.evaluating = register(called)

    def _end_evaluation(self) -> None:
        handle, self.evaluating = self.evaluating, None
        if handle is not None:
            handle.remove()

    def _called_in_evaluation(self, module: Any, args: Any) -> None:
        recorder = current_recorder()
        if recorder is None or module.training or recorder.step != self.evaluated_at:
            return
        number = next((n for n, known in enumerate(self.known) if known() is module), -1)
        if number < 0 or number in self.evaluated or hands_off():
            return
        self.evaluated.add(number)
        if len(self.evaluated) == len(self.known):
            self._end_evaluation()
        found = _own_tensors(module, _wrapped_modules())
        if found is not None:
            tensors = [tensor for _, tensor in (*found[0], *found[1])]
            event = OuterDigests(
                at=time.monotonic(),
                module=number,
                optimizer=self.optimizer,
                step=recorder.step,
                values="",
                evaluated=True,
            )
            self.waiting.add(event, Waiting(sums(tensors)[0]))

    def _digest(self, recorder: Recorder, step: int) -> None:
        if hands_off():
            return
        wrapped = _wrapped_modules()
        for number, reference in enumerate(self.known):
            module = reference()
            found = None if module is None else _own_tensors(module, wrapped)
            if found is None:
                continue
            tensors = [tensor for _, tensor in (*found[0], *found[1])]
            # The first ones and the last one whatever they cost: they decide.
            elements = sum(t.numel() for t in tensors)
            if elements > OUTER_ELEMENTS and step >= 10 and not recorder.affordable():
                continue
            event = OuterDigests(
                at=time.monotonic(),
                module=number,
                optimizer=self.optimizer,
                step=step,
                values="",
                queues=self._queues(number, tensors[len(found[0]) :], len(found[0])),
                update=self._update(recorder, number, module) if found[0] else (),
            )
            self.waiting.add(event, Waiting(sums(tensors)[0]))

    def _update(self, recorder: Recorder, number: int, module: Any) -> tuple[Place, ...]:
        """The line that writes to a module's parameters, searched for once."""
        if number in self.searched:
            return ()
        self.searched.add(number)
        kind = recorder.sites.kind
        found = update_in_frames(sys._getframe(1), lambda code: kind(code) == "user", module)
        return () if found is None else places_of(recorder.sites, found)

    def _queues(self, number: int, buffers: list[Any], first: int) -> tuple[int, ...]:
        """The positions of the buffers, counted from `first`, that look like queues by what the
        step since the last call wrote. Asked of each module once, at the first two steps."""
        if number in self.copies:
            before = self.copies.pop(number)
            return tuple(
                first + n
                for n, (old, new) in enumerate(zip(before, buffers, strict=False))
                if old is not None and old.shape == new.shape and writes_a_block(old, new)
            )
        if number not in self.copied:
            self.copied.add(number)
            self.copies[number] = [
                t.detach().clone() if readable(t) and t.numel() <= OUTER_COPIED else None
                for t in buffers
            ]
        return ()

    def _write(self, recorder: Recorder, *, wait: bool = False) -> None:
        for event, (values,) in self.waiting.take(wait=wait):
            recorder.emit(replace(event, values=pack(values)))

    def _state_taken(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not self.known:
            return
        inside = {id(part) for part in args[0].modules()}
        for number, reference in enumerate(self.known):
            count = self.taken.get(number, 0)
            if count < OUTER_STATES and (m := reference()) is not None and id(m) in inside:
                self.taken[number] = count + 1
                recorder.emit(
                    OuterStateTaken(
                        at=time.monotonic(), module=number, step=recorder.step, site=recorder.site()
                    )
                )

    def _destroying(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if not (args or kwargs.get("group")):
            self._finish(recorder)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._finish(recorder)

    def _finish(self, recorder: Recorder) -> None:
        """Digest a last time, and write what is pending."""
        self._end_evaluation()
        self._digest(recorder, AT_END)
        self._write(recorder, wait=True)
        self.known.clear()


def _tensors_in(output: Any) -> Iterator[Any]:
    """The tensors that a module returned, as far as they lie on the surface."""
    values = output.values() if isinstance(output, dict) else output
    for value in values if isinstance(output, (tuple, list, dict)) else (output,):
        if hasattr(value, "requires_grad"):
            yield value


def _wrapped_modules() -> set[int]:
    """Ids of the modules inside of wrapped models."""
    inner = (model.inner() for model in WrappedModels.current.live())
    return {id(part) for module in inner if module is not None for part in module.modules()}


Named = list[tuple[str, Any]]


def _own_tensors(module: Any, wrapped: set[int]) -> tuple[Named, Named, bool] | None:
    """Floating-point parameters that no optimizer holds, and persistent buffers, of the parts of a
    module that are in no wrapped model, by name; and whether an optimizer holds others of its
    parameters. None if some are sharded."""
    held = Optimizers.current.parameters()
    parameters: Named = []
    buffers: Named = []
    trained = False
    for path, part in module.named_modules():
        if id(part) in wrapped:
            continue
        before = f"{path}." if path else ""
        for name, tensor in part._parameters.items():
            if tensor is None:
                continue
            if hasattr(tensor, "device_mesh") or "FSDP" in type(part).__name__:
                return None
            trained |= id(tensor) in held
            if tensor.is_floating_point() and id(tensor) not in held:
                parameters.append((before + name, tensor))
        for name, tensor in part._buffers.items():
            kept = name not in part._non_persistent_buffers_set
            if tensor is not None and kept and tensor.is_floating_point():
                buffers.append((before + name, tensor))
    return parameters, buffers, trained


def _made(module: Any, name: str) -> int:
    """The site of the line that made the part of a module which holds a tensor."""
    for part in name.split(".")[:-1]:
        module = module._modules[part]
    return ModuleOrigins.current.origin_site(module)


def _part_like(module: Any) -> tuple[int, str] | None:
    """A part of a wrapped model with the class and the parameters of a module, or of the only one
    inside of it (`AveragedModel`)."""
    inside = list(module._modules.values())
    if len(inside) == 1 and not module._parameters and inside[0] is not None:
        found = _part_like(inside[0])
        if found is not None:
            return found
    look = _look(module)
    for model in WrappedModels.current.live() if look else ():
        inner = model.inner()
        for path, part in () if inner is None else inner.named_modules():
            if type(part) is type(module) and _look(part) == look:
                return model.number, path
    return None


def _look(module: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]
