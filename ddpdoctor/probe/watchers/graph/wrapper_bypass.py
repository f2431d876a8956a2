"""Backwards into the parameters of a wrapped model that went around its wrapper."""

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
from ...source.call_resolver import Bound, call_in_frames
from ...tensors.digests import digests, readable
from ...training import forwards, lifecycle, optimizers
from ...training.records import Backward, Step
from ...training.tracked_model import Model
from ..manual_sync import exchanges, parallelism

LOST = "forwards that go around DistributedDataParallel"

MOVED_AT_LEAST = 3
"""Such backwards after which the program itself changed what it trains."""

LOOKS = 3
"""Searches through the running functions' source per model."""

ARMED_STEPS = 50
"""Optimizer steps for which the probe waits to see the next such forward happen."""

ARMED_AT_MOST = 3
"""Times that it does so, per model."""


@dataclass
class Suspect:
    """A backward that reached a model without a forward of its wrapper.

    Attributes:
        stamps: position to identity of the gradients it left; while they are there, nothing has
            synchronised or cleared them.
        forwards: forwards of the wrapper since the step before.
        passed: the line of the forward before it, where that was seen, else -1.
    """

    backward: int
    site: int
    stamps: dict[int, int]
    forwards: int
    passed: int = -1


class Bypass:
    """What is known of one model.

    Attributes:
        calls: by line of such a backward, that of the forward before it: one that was seen, else
            one that was found in the source of what was running. `emitted`: those on record.
        passed: the line of the first forward that was seen since the last such backward, -1 for
            none; `armed` times the probe waited to see one.
        by_hand: digests of a few parameters at the last such backward, where no optimizer holds the
            model; `moved` such backwards found that they had changed since the one before.
    """

    def __init__(self) -> None:
        self.suspect: Suspect | None = None
        self.calls: dict[int, int] = {}
        self.passed = -1
        self.looks = 0
        self.armed = 0
        self.count = 0
        self.emitted: set[int] = set()
        self.on_record: Bypassed | None = None
        self.last: Bypassed | None = None
        self.by_hand: list[int] = []
        self.moved = 0


_known: defaultdict[Model, Bypass] = defaultdict(Bypass)


_following = Subscriptions()
"""Of all that comes after the first such backward."""


class _Trap:
    """A hook on every module's forward, in place only while one is waited for."""

    handle: Any = None
    modules: weakref.WeakSet[Any] = weakref.WeakSet()
    model: Model | None = None
    until = 0


def install() -> None:
    _disarm()
    _known.clear()
    lifecycle.backward_astray.subscribe(_backward_astray, lost=LOST)
    _following[:] = (
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, awake=False),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),
        lifecycle.closure_ends.subscribe(_judge, lost=LOST, awake=False),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST, awake=False),
    )
    hooks.leaving.subscribe(_leaving, lost=LOST)
    on_restore(_disarm)


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    for model in backward.models:
        if model.number in backward.synced and model in _known:
            known = _known[model]
            known.suspect, known.passed, known.by_hand = None, -1, []


def _backward_astray(recorder: Recorder, backward: Backward) -> None:
    for model, communicated in backward.unannounced:
        if communicated or not _meant_to_synchronise(model):
            continue
        known = _known[model]
        forwards = model.forwards_in_step if model.forward_step == recorder.step else 0
        again = known.suspect is not None  # no optimizer has applied it since
        known.suspect = Suspect(
            backward.number, backward.site, _stamps(model), forwards, known.passed
        )
        known.passed = -1
        _following.enable()
        if backward.site not in known.calls and known.looks < LOOKS:
            known.looks += 1
            if (call := _look(recorder, model)) >= 0:
                known.calls[backward.site] = call
        if again:
            _follow_by_hand(recorder, model, known, known.suspect)


def _follow_by_hand(recorder: Recorder, model: Model, known: Bypass, suspect: Suspect) -> None:
    """Where no optimizer holds the model, and nothing was ever exchanged that may be its gradients
    or its parameters, they are the ones of such backwards that the program applies by itself."""
    parameters = [p for ref in model.parameters if (p := ref()) is not None]
    held = optimizers.held()
    if model.ddp() is None or any(id(p) in held for p in parameters):
        known.by_hand, known.moved = [], 0
        return
    before, known.by_hand = known.by_hand, digests(ref() for ref in model.sampled)
    certain = suspect.forwards == 0 or suspect.site in known.calls
    if not before or before == known.by_hand or not certain:
        return
    if parallelism.special() or exchanges.values_exchanged(parameters):
        return
    known.moved += 1
    if known.moved >= MOVED_AT_LEAST:
        _emit(recorder, model, known, suspect, UNHELD, known.moved)


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


def _look(recorder: Recorder, model: Model) -> int:
    """The user's line that called the inner module or one of its own methods."""
    inner = model.inner()
    if inner is None:
        return -1
    parts = {id(part) for part in inner.modules()}

    def wanted(target: Any) -> bool:
        if isinstance(target, MethodType):
            function = getattr(target, "__func__", None)
            return id(target.__self__) in parts and _users(recorder, function)
        if isinstance(target, Bound):
            return id(target.owner) in parts and _users(recorder, target.function)
        if id(target) in parts:
            return True
        stored = getattr(target, "__dict__", None)
        inside = stored.get("_modules") if isinstance(stored, dict) else None
        return isinstance(inside, dict) and id(inside.get("_orig_mod")) in parts

    def is_user(code: CodeType) -> bool:
        return recorder.sites.kind(code) == "user"

    found = call_in_frames(sys._getframe(1), is_user, wanted)
    return recorder.sites.number(found.code, found.line) if found else -1


def _users(recorder: Recorder, function: Any) -> bool:
    """`model.module.loss` is the user's; `.parameters`, `.train` are torch's. `forward` counts."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", "")
    return code is not None and (recorder.sites.kind(code) != "own" or name == "forward")


def _step_begins(recorder: Recorder, step: Step) -> None:
    if not step.closure:  # else what it applies is yet to come
        _judge(recorder, step)


def _judge(recorder: Recorder, step: Step) -> None:
    optimizer = step.optimizer()
    suspects = [(m, k) for m, k in list(_known.items()) if k.suspect is not None]
    if optimizer is None or not suspects:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model, known in suspects:
        parameters = [p for ref in model.parameters if (p := ref()) is not None]
        if held.isdisjoint(map(id, parameters)):
            continue
        suspect, known.suspect = known.suspect, None
        assert suspect is not None
        # Two backwards over one forward look the same; a call that was seen, or no forward of the
        # wrapper at all, tells them apart.
        certain = suspect.forwards == 0 or suspect.site in known.calls
        if not certain or not _still_there(model, suspect):
            continue
        if exchanges.gradients_exchanged([p for p in parameters if id(p) in held]):
            continue
        _emit(recorder, model, known, suspect, step.known.number, step.number)


def _still_there(model: Model, suspect: Suspect) -> bool:
    """Whether the gradients of that backward are what the optimizer is about to apply."""
    for position, stamp in suspect.stamps.items():
        parameter = model.parameters[position]()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or id(gradient) != stamp:
            continue
        if not readable(gradient) or bool(gradient.any()):
            return True
    return False


def _emit(
    recorder: Recorder, model: Model, known: Bypass, suspect: Suspect, optimizer: int, step: int
) -> None:
    known.count += 1
    if suspect.passed >= 0:
        known.calls[suspect.site] = suspect.passed
        known.armed = ARMED_AT_MOST
        if _Trap.model is model:
            _disarm()
    elif known.armed < ARMED_AT_MOST:
        _arm(recorder, model, known)
    call = known.calls.get(suspect.site, -1)
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
    )
    if call not in known.emitted or known.count & (known.count - 1) == 0:
        known.emitted.add(call)
        known.on_record = known.last
        recorder.emit(known.last, vital=True)


def _leaving(recorder: Recorder, _: None) -> None:
    for known in _known.values():
        if known.last is not None and known.last is not known.on_record:
            recorder.emit(known.last, vital=True)


def _step_ends(recorder: Recorder, step: Step) -> None:
    if _Trap.handle is not None and recorder.step > _Trap.until:
        _disarm()


def _arm(recorder: Recorder, model: Model, known: Bypass) -> None:
    """See the next forwards that go around the wrapper as they happen, up to one whose gradients
    are applied."""
    import torch

    inner = model.inner()
    if inner is None or _Trap.handle is not None or compiling():
        return
    modules = list(inner.modules())
    if any(hasattr(m, "_orig_mod") or isinstance(m, torch.jit.ScriptModule) for m in modules):
        return
    known.armed += 1
    known.passed = -1
    _Trap.modules = weakref.WeakSet(modules)
    _Trap.model, _Trap.until = model, recorder.step + ARMED_STEPS
    _Trap.handle = torch.nn.modules.module.register_module_forward_pre_hook(_sprung)


def _disarm() -> None:
    handle, _Trap.handle, _Trap.model = _Trap.handle, None, None
    if handle is not None:
        handle.remove()


def _sprung(module: Any, args: Any) -> None:
    try:
        import torch

        recorder, model = current_recorder(), _Trap.model
        if recorder is None or model is None or forwards.running():
            return
        if not torch.is_grad_enabled() or module not in _Trap.modules or not module.training:
            return
        known = _known.get(model)
        if known is None or known.passed >= 0:
            return
        frame = _caller(recorder, sys._getframe(1))
        if frame is not None:
            known.passed = recorder.sites.number(frame.f_code, frame.f_lineno)
    except Exception as error:
        if (recorder := current_recorder()) is not None:
            recorder.trouble("bypass.trap", error, LOST)


def _caller(recorder: Recorder, frame: FrameType | None) -> FrameType | None:
    """The user's frame that chose to go into the model: the first that was not given a part of it,
    as its methods are, or that has the wrapper at hand; else the outermost that is no method."""
    wrapper = None if _Trap.model is None else _Trap.model.ddp()
    outermost = None
    while frame is not None:
        if recorder.sites.kind(frame.f_code) == "user":
            known, code = variables(frame), frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [_is_part(known.get(name)) for name in names]
            at_hand = wrapper is not None and any(value is wrapper for value in known.values())
            if not any(given) or at_hand:
                return frame
            outermost = outermost if given[0] else frame
        frame = frame.f_back
    return outermost


def _is_part(value: Any) -> bool:
    import torch

    return issubclass(type(value), torch.nn.Module) and value in _Trap.modules
