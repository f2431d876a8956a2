"""Which modules of a wrapped model are in evaluation mode when it trains?

Only modules that behave otherwise in evaluation count (dropout, normalisation, code that asks for
`self.training`), and only forwards whose backward synchronises: these have the same number on every
rank. Modes are looked at after calls of `train()` and `eval()`, and in sampled forwards.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ....events import TrainingMode
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...training import lifecycle, optimizer_models
from ...training.module_origins import ModuleOrigins
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from .limits import MODE_CALLS_KEPT, MODES_EMITTED, MODULES_NAMED

CHANCES = ("p", "drop_prob", "drop_rate", "dropout")
"""Attributes of modules that drop: where one of them is zero, the mode changes nothing."""


class _ModeCall(NamedTuple):
    """A call of `train(mode)`, or of `eval()`."""

    module: weakref.ref[Any]
    mode: bool
    site: int


class _Modal(NamedTuple):
    """A module that behaves otherwise in evaluation; `sure`: its class is one of torch's."""

    name: str
    module: weakref.ref[Any]
    sure: bool


class _Modes:
    """What is known of one model.

    Attributes:
        modal: its modules whose mode matters; `registrations` of parameters in the process when
            they were listed.
        emitted: the modes recorded last, None before the first.
        seen: modes of the last forward that are not on record yet, with their event.
        count: events recorded.
    """

    def __init__(self) -> None:
        self.modal: list[_Modal] = []
        self.registrations = -1
        self.emitted: tuple[bool, ...] | None = None
        self.seen: tuple[tuple[bool, ...], TrainingMode] | None = None
        self.count = 0


class _Outermost:
    """Whether no `train()` is running: it calls that of every submodule."""

    looking = True


class TrainingModes(Watcher):
    """
    Attributes:
        models: by model.
        calls: the last calls of `train()` and `eval()`.
        unseen: models that have had no forward since the last of these calls; while there are any,
            `looking` is enabled.
        settling: enabled while modes wait for their backward.
    """

    lost = "the modes (`train()`, `eval()`) of models"

    def __init__(self) -> None:
        self.models: WeakKeyDictionary[Model, _Modes] = WeakKeyDictionary()
        self.calls: list[_ModeCall] = []
        self.unseen: set[Model] = set()
        self.looking = Subscriptions()
        self.settling = Subscriptions()
        self._outermost = _Outermost()

    def install(self) -> None:
        import torch.nn

        self.around(
            torch.nn.Module,
            "train",
            before=self._train_begins,
            after=self._train_ends,
            only=self._outermost,
        )

    def _train_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        self._outermost.looking = False
        mode = args[1] if len(args) > 1 else kwargs.get("mode", True)
        live = WrappedModels.current.live()
        if not live:
            return
        self.calls.append(_ModeCall(weakref.ref(args[0]), bool(mode), recorder.site()))
        del self.calls[:-MODE_CALLS_KEPT]
        self.unseen.update(live)
        self.looking.enable()

    def _train_ends(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        self._outermost.looking = True

    @on(lifecycle.forward_begins, during="looking")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        if forward.grad_enabled and forward.model in self.unseen:
            self.unseen.discard(forward.model)
            if not self.unseen.intersection(WrappedModels.current.live()):
                self.unseen.clear()
                self.looking.disable()
            self._look(recorder, forward)

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        self._look(recorder, forward)

    def _look(self, recorder: Recorder, forward: Forward) -> None:
        model = forward.model
        known = self.models.get(model)
        if known is None:
            known = self.models[model] = _Modes()
        inner = model.inner()
        if inner is None or known.count >= MODES_EMITTED:
            return
        if known.registrations != ModuleOrigins.current.registrations:
            known.registrations = ModuleOrigins.current.registrations
            known.modal = list(_modal(inner))
        if not known.modal:
            return
        held = [(one, module) for one in known.modal if (module := one.module()) is not None]
        modes = (bool(inner.training), *[bool(module.training) for _, module in held])
        known.seen = None
        if modes == known.emitted:
            return
        evaluating = [(one, module) for one, module in held if not module.training]
        before = known.emitted or (True,) * len(modes)
        pairs = zip(held, before[1:], modes[1:], strict=False)
        changed = [module for (_, module), then, now in pairs if then != now]
        event = TrainingMode(
            at=time.monotonic(),
            model=model.number,
            backward=model.synced_backwards,
            forwards=model.forwards,
            step=optimizer_models.steps_of(model),
            whole=not inner.training,
            evaluating={
                one.name: type(module).__name__ for one, module in evaluating[:MODULES_NAMED]
            },
            count=len(evaluating),
            total=len(held),
            unsure=tuple(one.name for one, _ in held if not one.sure)[:MODULES_NAMED],
            site=self._site_of(changed[0] if changed else held[0][1]),
            forward_site=forward.site,
            last=known.count + 1 == MODES_EMITTED,
        )
        known.seen = modes, event
        self.settling.enable()

    def _site_of(self, module: Any) -> int:
        """The line of the last call that put a module into its mode, -1 if there was none."""
        for call in reversed(self.calls):
            root = call.module()
            if root is not None and any(part is module for part in root.modules()):
                return call.site if call.mode is module.training else -1
        return -1

    @on(lifecycle.backward_begins, during="settling")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        """Modes are on record before the backward, which may be the one that hangs."""
        for model in WrappedModels.current.live():
            known = self.models.get(model)
            if known is None or known.seen is None or not (model.pending and model.pending_sync):
                continue
            known.emitted, event = known.seen
            known.seen = None
            known.count += 1
            recorder.emit(event)
        if all(known.seen is None for known in self.models.values()):
            self.settling.disable()


def _modal(inner: Any) -> Iterator[_Modal]:
    """The modules of a model that behave otherwise in evaluation."""
    asking: dict[type, bool] = {}
    for name, module in inner.named_modules():
        sure = _torch_decides(module)
        if sure is None and (kind := type(module)) not in asking:
            asking[kind] = _asks(kind)
        if sure or (sure is None and asking[type(module)] and _drops(module)):
            yield _Modal(name, weakref.ref(module), bool(sure))


def _torch_decides(module: Any) -> bool | None:
    """Whether evaluation changes what a module of torch's computes; None for one that torch knows
    nothing of."""
    from torch import nn

    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.running_mean is not None  # else it always takes the batch's
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout) and module.num_layers > 1
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout)
    if isinstance(module, nn.RReLU):
        return True
    return False if type(module).__module__.startswith("torch.") else None


def _drops(module: Any) -> bool:
    """Whether no attribute says that a module drops with chance zero."""
    chances = [vars(module).get(name) for name in CHANCES]
    return not any(isinstance(p, (int, float)) and p == 0 for p in chances)


def _asks(kind: type) -> bool:
    """Whether code of a module's class reads `training`, other than to choose what it keeps in
    memory (`gradient_checkpointing`)."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            return False
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in ("train", "eval", "__init__"):
                names = {word for code in _codes(value.__code__) for word in code.co_names}
                if "training" in names and "gradient_checkpointing" not in names:
                    return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
