"""Which errors does DDP's reducer raise, and which communication hooks replace its all-reduce?

Looked at: parameters marked ready twice, static graphs that change, and backwards of static graphs
that silently do not synchronise.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import partial
from types import CodeType
from typing import Any

from ....events import CommHook, ReadyTwice, StaticGraphBroken
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...source.source_text import call_named
from ...training import lifecycle, optimizer_models
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels

HOOKS = "communication hooks of wrapped models"

TWICE = "mark a variable ready only once"
CHANGED = "training graph has changed"
ASSERTED = "expect_autograd_hooks_"
PARAMETER = re.compile(r"Parameter at index (\d+)(?: with name (\S+))?")


class ReducerErrors(Watcher):
    lost = "errors of DDP's synchronisation"

    def __init__(self) -> None:
        # Backwards of models with a static graph that should have been synchronised and were
        # not.
        self._silent: Counter[Model] = Counter()
        # By model with a static graph, positions whose hooks fired in the first synchronised
        # backward without a gradient. DDP counts on them from then on.
        self._without_gradient: dict[Model, set[int]] = {}
        # By model with a static graph, the most backwards nested in one: re-entrant
        # checkpointing.
        self._nested: Counter[Model] = Counter()
        self._static = Subscriptions()

    def install(self) -> None:
        from torch.nn.parallel.distributed import DistributedDataParallel

        self.around(
            DistributedDataParallel,
            "register_comm_hook",
            before=_registering_comm_hook,
            after=_comm_hook_registered,
            lost=HOOKS,
        )

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        if model.static_graph:
            self._static.enable()

    @on(lifecycle.forward_failed)
    def _forward_failed(self, recorder: Recorder, forward: Forward) -> None:
        self._check_static_graph(recorder, forward.model, str(forward.error), -1)

    @on(lifecycle.backward_failed)
    def _backward_failed(self, recorder: Recorder, backward: Backward) -> None:
        text = str(backward.error)
        if TWICE in text:
            _emit_twice(recorder, backward, text)
        for model in WrappedModels.current.live():
            self._check_static_graph(recorder, model, text, backward.site)

    @on(lifecycle.backward_ends, during="_static")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        for model in backward.models:
            if not model.static_graph:
                continue
            self._nested[model] = max(self._nested[model], backward.nested)
            silent = model.number not in backward.synced
            if not silent and model not in self._without_gradient:
                firing = next((k.firing for k in backward.observations if k.model is model), None)
                self._without_gradient[model] = (
                    firing.counts.keys() - firing.given if firing is not None else set()
                )
            if silent and backward.expected_sync[model.number]:
                self._silent[model] += 1
                if self._silent[model] & (self._silent[model] - 1) == 0:
                    untouched = backward.untouched.get(model.number, ())
                    promised = (
                        untouched
                        if self._without_gradient.get(model, set()).issuperset(untouched)
                        else ()
                    )
                    self._emit_static(recorder, model, "silent", backward.site, promised)

    def _check_static_graph(self, recorder: Recorder, model: Model, text: str, site: int) -> None:
        if model.static_graph and (CHANGED in text or ASSERTED in text):
            self._emit_static(recorder, model, "changed" if CHANGED in text else "asserted", site)

    def _emit_static(
        self, recorder: Recorder, model: Model, kind: str, site: int, promised: tuple[int, ...] = ()
    ) -> None:
        recorder.emit(
            StaticGraphBroken(
                at=time.monotonic(),
                model=model.number,
                kind=kind,
                step=optimizer_models.steps_of(model),
                backward=model.synced_backwards,
                silent=self._silent[model],
                unsynced=model.unsynced,
                unsynced_site=model.unsynced_site,
                site=site,
                forward_site=model.forward_site,
                promised=promised,
                nested=self._nested[model],
                checkpoint_site=_checkpoint_site(recorder, model) if self._nested[model] else -1,
            ),
            vital=True,
        )


def _registering_comm_hook(recorder: Recorder, args: Args, kwargs: Kwargs) -> CommHook | None:
    model = WrappedModels.current.of_wrapper(args[0])
    hook = args[2] if len(args) > 2 else kwargs.get("hook")
    while isinstance(hook, partial):
        hook = hook.func
    if model is None or hook is None:
        return None
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    name = f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"
    return CommHook(at=time.monotonic(), model=model.number, name=name, site=recorder.site())


def _comm_hook_registered(recorder: Recorder, hook: Any, result: Any, error: Error) -> None:
    if hook is not None and error is None:
        recorder.emit(hook)


def _emit_twice(recorder: Recorder, backward: Backward, text: str) -> None:
    model = _model_of_error(backward, text)
    if model is None:
        return
    found = PARAMETER.search(text)
    name = (found.group(2) or "").rstrip(".,") if found else ""
    if found and not name and int(found.group(1)) < len(model.expected):
        name = model.names[model.expected[int(found.group(1))]]
    counts = backward.fired.get(model.number, {})
    recorder.emit(
        ReadyTwice(
            at=time.monotonic(),
            model=model.number,
            step=optimizer_models.steps_of(model),
            parameter=name.removeprefix("."),
            twice=tuple(model.names[i] for i, n in sorted(counts.items()) if n > 1),
            nested=backward.nested,
            forwards=model.forwards_now,
            backwards=model.backwards_now,
            find_unused=model.find_unused,
            static_graph=model.static_graph,
            site=backward.site,
            forward_site=model.forward_site,
            checkpoint_site=_checkpoint_site(recorder, model) if backward.nested else -1,
            backward=model.synced_backwards + 1,
        ),
        vital=True,
    )


def _model_of_error(backward: Backward, text: str) -> Model | None:
    """The model an error of torch is about: one with the named parameter, or one that waits for a
    backward; None if no model is wrapped."""
    live = WrappedModels.current.live()
    found = PARAMETER.search(text)
    named = found.group(2).rstrip(".,") if found and found.group(2) else ""
    having = [m for m in live if named.removeprefix(".") in m.names] if named else []
    waiting = [m for m in live if m.pending or backward.fired.get(m.number)]
    return next(iter([m for m in having if m in waiting] or having or waiting or live), None)


def _checkpoint_site(recorder: Recorder, model: Model) -> int:
    """Site of a call of `checkpoint` in the model's code, -1 if none is found."""
    inner = model.inner()
    for module in inner.modules() if inner is not None else ():
        found: tuple[CodeType, int] | None = call_named(
            module, ("checkpoint", "checkpoint_sequential")
        )
        if found is not None and recorder.sites.kind(found[0]) == "user":
            return recorder.sites.number(*found)
    return -1
