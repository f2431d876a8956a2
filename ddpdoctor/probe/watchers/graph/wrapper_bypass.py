"""Does a backward reach a wrapped model although its wrapper was not called?

Then DDP does not average these gradients. A backward without a pending forward of the wrapper is
suspected; it is recorded once an optimizer is about to apply its gradients.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any

from ....events import Bypassed
from ....events.drift import UNHELD
from ...recording import hooks
from ...recording.frames import variables
from ...recording.hooks import Subscriptions
from ...recording.patching import on_restore
from ...recording.recorder import Recorder, current_recorder
from ...recording.torch_compat import compiling
from ...recording.watcher import Watcher, on
from ...source.call_resolver import Bound, call_in_frames
from ...source.taken_out import handed_on, taken_out
from ...tensors.digests import digests, readable
from ...training import lifecycle
from ...training.forwards import Forwards
from ...training.optimizers import Optimizers
from ...training.records import Backward, Step
from ...training.tracked_model import Model
from ..manual_sync.exchanges import Exchanges
from ..manual_sync.parallelism import Parallelism
from .limits import ARMED_AT_MOST, ARMED_STEPS, BYPASS_LOOKS, MOVED_AT_LEAST


@dataclass
class Suspect:
    """A backward that reached a model without a forward of its wrapper.

    Attributes:
        stamps: by position, identities of the gradients it left; unchanged ones were neither
            synchronised into another tensor nor cleared.
        forwards: forwards of the wrapper since the last step.
        call_site: line of the bypassing forward, -1 if it was not observed.
    """

    backward: int
    site: int
    stamps: dict[int, int]
    forwards: int
    call_site: int = -1


class Bypass:
    """The bypassing backwards of one model.

    Attributes:
        suspect: the last one, until a step settles it.
        calls: by line of a backward, the line of its forward: observed, or else found by source.
        call_site: line of the first bypassing forward observed since the last suspect, -1 for none.
        within, handed: as in `Bypassed`, with the site.
        looks, armed: see `BYPASS_LOOKS` and `ARMED_AT_MOST`.
        count: steps on bypassing gradients so far.
        emitted: lines of forwards on record.
        on_record, last: the event recorded last, and the latest one.
        taken: the lines that took the model out of the wrapper, as in `Bypassed`; None until they
            are searched for.
        digests: of a few parameters at the last suspect, if no optimizer holds the model; `moved`
            counts the suspects that found them changed.
    """

    def __init__(self) -> None:
        self.suspect: Suspect | None = None
        self.calls: dict[int, int] = {}
        self.call_site = -1
        self.within = self.handed = ("", -1)
        self.looks = 0
        self.armed = 0
        self.count = 0
        self.emitted: set[int] = set()
        self.on_record: Bypassed | None = None
        self.last: Bypassed | None = None
        self.taken: tuple[int, int] | None = None
        self.digests: list[int] = []
        self.moved = 0


class WrapperBypass(Watcher):
    """The global forward hook, registered only while a bypassing forward is awaited."""

    lost = "forwards that go around DistributedDataParallel"

    def __init__(self) -> None:
        self.handle: Any = None
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self.model: Model | None = None
        self.until = 0
        self._known: defaultdict[Model, Bypass] = defaultdict(Bypass)
        # Enabled from the first suspected backward on.
        self._following = Subscriptions()

    def install(self) -> None:
        self._disarm()
        on_restore(self._disarm)

    @on(lifecycle.backward_ends, during="_following")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        for model in backward.models:
            if model.number in backward.synced and model in self._known:
                known = self._known[model]
                known.suspect, known.call_site, known.digests = None, -1, []

    @on(lifecycle.backward_unannounced)
    def _backward_unannounced(self, recorder: Recorder, backward: Backward) -> None:
        for model, communicated in backward.unannounced:
            if communicated or not _meant_to_synchronise(model):
                continue
            known = self._known[model]
            forwards = model.forwards_in_step if model.forward_step == recorder.step else 0
            again = known.suspect is not None  # no optimizer has applied the last one's gradients
            known.suspect = Suspect(
                backward.number, backward.site, _stamps(model), forwards, known.call_site
            )
            known.call_site = -1
            self._following.enable()
            if backward.site not in known.calls and known.looks < BYPASS_LOOKS:
                known.looks += 1
                if (call := _find_call(recorder, model)) >= 0:
                    known.calls[backward.site] = call
            if again:
                self._detect_manual_update(recorder, model, known, known.suspect)

    def _detect_manual_update(
        self, recorder: Recorder, model: Model, known: Bypass, suspect: Suspect
    ) -> None:
        """Record a model in no optimizer whose parameters change between suspected backwards.

        The program then applies these gradients manually. Nothing is recorded if its gradients or
        parameters may have been exchanged.
        """
        parameters = [p for ref in model.parameters if (p := ref()) is not None]
        held = Optimizers.current.parameters()
        if model.ddp() is None or any(id(p) in held for p in parameters):
            known.digests, known.moved = [], 0
            return
        before, known.digests = known.digests, digests(ref() for ref in model.sampled)
        certain = suspect.forwards == 0 or suspect.site in known.calls
        if not before or before == known.digests or not certain:
            return
        if Parallelism.current.special or Exchanges.current.values_exchanged(parameters):
            return
        known.moved += 1
        if known.moved >= MOVED_AT_LEAST:
            self._emit(recorder, model, known, suspect, UNHELD, known.moved)

    @on(lifecycle.step_begins, during="_following")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        if not step.closure:  # a closure has yet to compute the gradients
            self._judge_step(recorder, step)

    @on(lifecycle.closure_ends, during="_following")
    def _judge_step(self, recorder: Recorder, step: Step) -> None:
        optimizer = step.optimizer()
        suspects = [(m, k) for m, k in list(self._known.items()) if k.suspect is not None]
        if optimizer is None or not suspects:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model, known in suspects:
            parameters = [p for ref in model.parameters if (p := ref()) is not None]
            if held.isdisjoint(map(id, parameters)):
                continue
            suspect, known.suspect = known.suspect, None
            assert suspect is not None
            # A second backward over one forward of the wrapper looks like a bypass. Without any
            # forward of the wrapper, or with a known call of the inner module, it is one.
            certain = suspect.forwards == 0 or suspect.site in known.calls
            if not certain or not _still_there(model, suspect):
                continue
            if Exchanges.current.gradients_exchanged([p for p in parameters if id(p) in held]):
                continue
            self._emit(recorder, model, known, suspect, step.known.number, step.number)

    def _emit(
        self,
        recorder: Recorder,
        model: Model,
        known: Bypass,
        suspect: Suspect,
        optimizer: int,
        step: int,
    ) -> None:
        known.count += 1
        if suspect.call_site >= 0:
            known.calls[suspect.site] = suspect.call_site
            known.armed = ARMED_AT_MOST
            if self.model is model:
                self._disarm()
        elif known.armed < ARMED_AT_MOST:
            self._arm(recorder, model, known)
        call = known.calls.get(suspect.site, -1)
        if known.taken is None:
            known.taken = _taken_out(recorder, model)
        known.last = Bypassed(
            at=time.monotonic(),
            model=model.number,
            optimizer=optimizer,
            step=step,
            count=known.count,
            forwards=model.forwards,
            site=suspect.site,
            call_site=call,
            discarded=model.wrapper is None or model.wrapper() is None,
            named_site=known.taken[0],
            taken_site=known.taken[1],
            within=known.within[0],
            within_site=known.within[1],
            handed=known.handed[0],
            handed_site=known.handed[1],
        )
        if call not in known.emitted or known.count & (known.count - 1) == 0:
            known.emitted.add(call)
            known.on_record = known.last
            recorder.emit(known.last, vital=True)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for known in self._known.values():
            if known.last is not None and known.last is not known.on_record:
                recorder.emit(known.last, vital=True)

    @on(lifecycle.step_ends, during="_following")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        if self.handle is not None and recorder.step > self.until:
            self._disarm()

    def _arm(self, recorder: Recorder, model: Model, known: Bypass) -> None:
        """Register the global hook, to observe the next forward that bypasses the wrapper."""
        import torch

        inner = model.inner()
        if inner is None or self.handle is not None or compiling():
            return
        modules = list(inner.modules())
        if any(hasattr(m, "_orig_mod") or isinstance(m, torch.jit.ScriptModule) for m in modules):
            return
        known.armed += 1
        known.call_site = -1
        self.modules = weakref.WeakSet(modules)
        self.model, self.until = model, recorder.step + ARMED_STEPS
        self.handle = torch.nn.modules.module.register_module_forward_pre_hook(self._forward_called)

    def _disarm(self) -> None:
        handle, self.handle, self.model = self.handle, None, None
        if handle is not None:
            handle.remove()

    def _forward_called(self, module: Any, args: Any) -> None:
        try:
            import torch

            recorder, model = current_recorder(), self.model
            if recorder is None or model is None or Forwards.current.running():
                return
            if not torch.is_grad_enabled() or module not in self.modules or not module.training:
                return
            known = self._known.get(model)
            if known is None or known.call_site >= 0:
                return
            frame = self._caller(recorder, sys._getframe(1))
            if frame is not None:
                known.call_site = recorder.sites.number(frame.f_code, frame.f_lineno)
                known.within = self._within(recorder, module, sys._getframe(1))
                known.handed = self._handed(recorder, frame)
        except Exception as error:
            if (recorder := current_recorder()) is not None:
                recorder.trouble("bypass.trap", error, self.lost)

    def _caller(self, recorder: Recorder, frame: FrameType | None) -> FrameType | None:
        """The user's frame that called into the model instead of the wrapper.

        The innermost frame without a part of the model among its arguments (as methods have in
        `self`), or with the wrapper in a variable; else the outermost that is no method of the
        model."""
        wrapper = None if self.model is None else self.model.ddp()
        outermost = None
        while frame is not None:
            if recorder.sites.kind(frame.f_code) == "user":
                known, code = variables(frame), frame.f_code
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                given = [self._is_part(known.get(name)) for name in names]
                at_hand = wrapper is not None and any(value is wrapper for value in known.values())
                if not any(given) or at_hand:
                    return frame
                outermost = outermost if given[0] else frame
            frame = frame.f_back
        return outermost

    def _handed(self, recorder: Recorder, caller: FrameType) -> tuple[str, int]:
        """How the caller came by the model, as in `Bypassed`."""
        model = self.model
        inner, wrapper = (model.inner(), model.ddp()) if model is not None else (None, None)
        if inner is None or wrapper is None:
            return "", -1
        kind = recorder.sites.kind
        found = handed_on(caller, lambda code: kind(code) == "user", inner, wrapper)
        if found is None:
            return "", -1
        return found.argument, recorder.sites.number(found.found.code, found.found.line)

    def _within(self, recorder: Recorder, called: Any, frame: FrameType | None) -> tuple[str, int]:
        """The class of the outermost module in whose `forward` a part of the model is called, and
        the line that calls it; of nothing where the model itself or a method of it runs."""
        import torch

        inner = None if self.model is None else self.model.inner()
        kind, site, other = "", -1, None
        while frame is not None and called is not inner:
            code = frame.f_code
            if recorder.sites.kind(code) == "user":
                if other is not None:
                    kind, site = type(other).__name__, recorder.sites.number(code, frame.f_lineno)
                first = variables(frame).get(code.co_varnames[0]) if code.co_argcount else None
                if first is inner:
                    return "", -1
                module = issubclass(type(first), torch.nn.Module) and first not in self.modules
                other = first if module and code.co_name == "forward" else None
            frame = frame.f_back
        return kind, site

    def _is_part(self, value: Any) -> bool:
        import torch

        return issubclass(type(value), torch.nn.Module) and value in self.modules


def _meant_to_synchronise(model: Model) -> bool:
    wrapper = model.ddp()
    return wrapper is None or bool(wrapper.require_backward_grad_sync)


def _stamps(model: Model) -> dict[int, int]:
    count = len(model.expected)
    stamps = {}
    for position in model.expected[:: max(1, count // 32)]:
        parameter = model.parameters[position]()
        if parameter is not None and parameter.grad is not None:
            stamps[position] = id(parameter.grad)
    return stamps


def _find_call(recorder: Recorder, model: Model) -> int:
    """Search the running functions for the line that calls the inner module or one of its methods;
    -1 if none is found."""
    inner = model.inner()
    if inner is None:
        return -1
    parts = {id(part) for part in inner.modules()}

    def wanted(target: Any) -> bool:
        if isinstance(target, MethodType):
            function = getattr(target, "__func__", None)
            return id(target.__self__) in parts and _is_users(recorder, function)
        if isinstance(target, Bound):
            return id(target.owner) in parts and _is_users(recorder, target.function)
        if id(target) in parts:
            return True
        stored = getattr(target, "__dict__", None)
        inside = stored.get("_modules") if isinstance(stored, dict) else None
        return isinstance(inside, dict) and id(inside.get("_orig_mod")) in parts

    def is_user(code: CodeType) -> bool:
        return recorder.sites.kind(code) == "user"

    found = call_in_frames(sys._getframe(1), is_user, wanted)
    return recorder.sites.number(found.code, found.line) if found else -1


def _taken_out(recorder: Recorder, model: Model) -> tuple[int, int]:
    """Sites of the lines that took the model out of its wrapper, as in `Bypassed`."""
    inner = model.inner()

    def is_user(code: CodeType) -> bool:
        return recorder.sites.kind(code) == "user"

    found = None
    if inner is not None:
        found = taken_out(sys._getframe(1), is_user, inner, model.made_at)
    if found is None:
        return -1, -1
    number, read = recorder.sites.number, found.read
    return number(found.named.code, found.named.line), -1 if read is None else number(
        read.code, read.line
    )


def _is_users(recorder: Recorder, function: Any) -> bool:
    """Whether a method is the user's (`model.module.loss`) or a `forward`, not another one of torch
    (`.parameters`, `.train`)."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", "")
    return code is not None and (recorder.sites.kind(code) != "own" or name == "forward")


def _still_there(model: Model, suspect: Suspect) -> bool:
    """Whether nonzero gradients of that backward still exist, for the optimizer to apply."""
    for position, stamp in suspect.stamps.items():
        parameter = model.parameters[position]()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or id(gradient) != stamp:
            continue
        if not readable(gradient) or bool(gradient.any()):
            return True
    return False
