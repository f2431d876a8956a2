"""Parameters that get no gradient, and which modules were called when they did not."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from ....events import ModulesSkipped, ParameterUse, UnusedParameters
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder, shielded
from ...recording.torch_compat import compiling, ready_indices, without_gradient
from ...source.source_text import branch_around
from ...training import lifecycle, optimizer_models
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from .unused_outputs import unspent

LOST = "unused parameters"

WATCHED_FORWARDS = 3
"""In this many first forwards of a model, and after the set of unused parameters changed, the
probe notes which submodules are called."""

WATCHES = 30
BRANCHES = 20
"""Unused modules whose deciding `if` is looked up."""

EMITTED_IN_FULL = 50
"""Changes of the set that get a record each; later ones are only counted."""


class Watched:
    """What is known of one model.

    Attributes:
        unused: the set told last, None where none was told.
        called: submodules called in the forwards that the next backward is for; None where that
            was not observed. `seeing` are those of them that were called with gradients on.
            `watches` is how many forwards may still be watched.
        shared: sets that a backward left out and another one over the same forward then brought.
        examined: synchronising backwards looked at; `counts` in how many of them the parameter at
            a position got no gradient.
    """

    def __init__(self) -> None:
        self.unused: tuple[int, ...] | None = None
        self.called: frozenset[str] | None = None
        self.seeing: frozenset[str] = frozenset()
        self.skipped: tuple[str, ...] | None = None
        self.watch: CallWatch | None = None
        self.due = WATCHED_FORWARDS
        self.watches = WATCHES
        self.emitted = 0
        self.shared: set[tuple[int, ...]] = set()
        self.examined = 0
        self.counts: dict[int, int] = {}

    def so_far(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        """`called` and `seeing`, with those of a forward in which the backward runs."""
        if self.watch is None or self.called is None:
            return self.called, self.seeing
        return self.called | self.watch.called, self.seeing | self.watch.seeing

    def busy(self) -> bool:
        """Whether a forward is watched, or was and its backward is still to come, or is to be."""
        return self.watch is not None or self.called is not None or self.expects()

    def expects(self) -> bool:
        """Whether the next forward is to be watched."""
        return self.due > 0 and self.watches > 0


_watched: defaultdict[Model, Watched] = defaultdict(Watched)
_calls = Subscriptions()
"""Of forwards, while there are some to be watched."""


def install() -> None:
    _watched.clear()
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    _calls[:] = (
        lifecycle.forward_begins.subscribe(_forward_begins, lost=LOST),
        lifecycle.forward_ends.subscribe(_forward_ends, lost=LOST),
    )
    lifecycle.forward_failed.subscribe(_forward_failed, lost=LOST)
    lifecycle.gradients_ready.subscribe(_gradients_ready, lost=LOST)
    lifecycle.gradients_missing.subscribe(_gradients_missing, lost=LOST)
    lifecycle.backward_examined.subscribe(_backward_examined, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)


def _wrapped(recorder: Recorder, model: Model) -> None:
    _watched[model] = Watched()
    _calls.enable()


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    watched = _watched[forward.model]
    if not forward.grad_enabled:
        return
    if watched.expects():
        watched.due, watched.watches = watched.due - 1, watched.watches - 1
        watched.watch = CallWatch.start(forward.model)
    if watched.watch is None:
        watched.called = None
        _calls.enable(any(w.busy() for w in _watched.values()))
    elif forward.model.pending == 1:
        watched.called = watched.seeing = frozenset()


def _forward_ends(recorder: Recorder, forward: Forward) -> None:
    watched = _watched[forward.model]
    watch, watched.watch = watched.watch, None
    if watch is not None:
        called = watch.stop()
        if watched.called is not None:
            watched.called |= called
            watched.seeing |= watch.seeing
        if forward.error is None:
            _emit_skipped(recorder, forward.model, watched, watch.owners - called)


def _forward_failed(recorder: Recorder, forward: Forward) -> None:
    if "finished reduction in the prior iteration" in str(forward.error):
        _learn_from_error(recorder, forward)


def _emit_skipped(recorder: Recorder, model: Model, watched: Watched, skipped: set[str]) -> None:
    """Before the backward, in which this rank may hang for the others."""
    names = tuple(sorted(skipped))
    if names != watched.skipped:
        watched.skipped = names
        recorder.emit(
            ModulesSkipped(
                at=time.monotonic(),
                model=model.number,
                backward=model.synced_backwards + 1,
                names=names,
                site=model.forward_site,
            )
        )


def _branches(recorder: Recorder, model: Model, unused: tuple[int, ...]) -> dict[str, int]:
    """Where the user's forward decides not to use the modules of these parameters."""
    inner = model.inner()
    if inner is None or not unused:
        return {}
    modules = dict(inner.named_modules())
    names = {id(p): n for n, m in modules.items() for p in m._parameters.values() if p is not None}
    owners = {names[k]: None for i in unused if (k := id(model.parameters[i]())) in names}
    found: dict[str, int] = {}
    for name in list(owners)[:BRANCHES]:
        words = name.split(".") if name else []
        for depth in range(len(words)):
            part, parent = ".".join(words[: depth + 1]), ".".join(words[:depth])
            if part in found or type(modules[parent]).__module__.startswith("torch."):
                continue
            place = branch_around(modules[parent], words[depth])
            if place is not None:
                found[part] = recorder.sites.number(*place)
    return found


def _learn_from_error(recorder: Recorder, forward: Forward) -> None:
    """torch noticed unused parameters in the backward before, and says which."""
    model = forward.model
    missing = without_gradient(str(forward.error))
    if not missing:
        # Collected in a few iterations only, therefore second.
        ready = ready_indices(forward.wrapper)
        missing = [i for i in range(len(model.expected)) if i not in ready] if ready else []
    unused = tuple(sorted(model.expected[i] for i in missing if i < len(model.expected)))
    watched = _watched[model]
    if unused and unused != watched.unused:
        watched.examined += 1
        _count(watched, unused)
        watched.called = None
        _emit(recorder, model, unused, model.synced_backwards, by_torch=True)


def _gradients_missing(recorder: Recorder, missing: tuple[Model, int]) -> None:
    """A backward left DDP waiting. Which parameters it waits for can be told now, where gradients
    are dropped between steps; the rank may not live to the next forward, in which torch does."""
    model, site = missing
    watched = _watched.get(model)
    if watched is None or model.find_unused or model.static_graph:
        return
    waiting = ((i, model.parameters[i]()) for i in model.expected)
    unused = tuple(i for i, p in waiting if p is not None and p.grad is None)
    if unused and unused != watched.unused and unused not in watched.shared:
        model.left = unused
        _emit(recorder, model, unused, model.synced_backwards, site)


def _gradients_ready(recorder: Recorder, moment: tuple[Backward, Model]) -> None:
    backward, model = moment
    if model.unfinished:
        _continued(recorder, model, (), backward.site)
    elif _watched[model].unused != ():
        _emit(recorder, model, (), model.synced_backwards + 1, backward.site)


def _backward_examined(recorder: Recorder, backward: Backward) -> None:
    for model in backward.models:
        untouched = backward.untouched.get(model.number)
        if untouched is None or not backward.expected_sync[model.number]:
            continue
        watched = _watched[model]
        watched.examined += 1
        if untouched not in watched.shared:
            _found(recorder, model, untouched, backward.site)
        _use_seen(recorder, model, watched)
    for model in backward.continued:
        if (untouched := backward.untouched.get(model.number)) is not None:
            _continued(recorder, model, untouched, backward.site)


def _continued(recorder: Recorder, model: Model, untouched: tuple[int, ...], site: int) -> None:
    """Another backward over the same forward brought what the one before it had left out."""
    watched = _watched[model]
    before = watched.unused
    if not before or before == untouched or not set(before).issuperset(untouched):
        return  # known to be shared
    watched.shared.add(before)
    for position in before:
        if (count := watched.counts.pop(position, 0) - 1) > 0:
            watched.counts[position] = count
    _found(recorder, model, untouched, site)
    _use_seen(recorder, model, watched)


def _found(recorder: Recorder, model: Model, untouched: tuple[int, ...], site: int) -> None:
    watched = _watched[model]
    _count(watched, untouched)
    if untouched != watched.unused:
        _emit(recorder, model, untouched, model.synced_backwards, site)


def _use_seen(recorder: Recorder, model: Model, watched: Watched) -> None:
    if watched.examined & (watched.examined - 1) == 0:
        _emit_use(recorder, model, watched)


def _count(watched: Watched, unused: tuple[int, ...]) -> None:
    for position in unused:
        watched.counts[position] = watched.counts.get(position, 0) + 1


def _emit(
    recorder: Recorder,
    model: Model,
    unused: tuple[int, ...],
    backward: int,
    site: int = -1,
    by_torch: bool = False,
) -> None:
    watched = _watched[model]
    watched.unused = unused
    watched.emitted += 1
    if watched.emitted > EMITTED_IN_FULL:
        return
    if unused or watched.emitted > 1:
        watched.due = max(watched.due, 2)
        _calls.enable()
    called, seeing = watched.so_far()
    parameters = model.live_parameters() or []
    step = optimizer_models.steps_of(model)
    total = max(0, model.backward_step) if by_torch else recorder.step
    if total < recorder.step:  # it is of the backward before, and the step that followed
        step = max(0, step - 1)
    recorder.emit(
        UnusedParameters(
            at=time.monotonic(),
            model=model.number,
            backward=backward,
            step=step,
            indices=unused,
            called=None if called is None else tuple(sorted(called)),
            blind=tuple(sorted((called or frozenset()) - seeing)),
            find_unused=model.find_unused,
            static_graph=model.static_graph,
            site=site,
            forward_site=model.forward_site,
            frozen=tuple(i for i in unused if parameters and not parameters[i].requires_grad),
            by_torch=by_torch,
            branches=_branches(recorder, model, unused),
            total=total,
            unspent=() if by_torch else unspent(recorder, model, unused),
        ),
        vital=True,
    )


def _emit_use(recorder: Recorder, model: Model, watched: Watched) -> None:
    recorder.emit(
        ParameterUse(
            at=time.monotonic(),
            model=model.number,
            examined=watched.examined,
            backwards=model.synced_backwards,
            unused=dict(watched.counts),
        ),
        vital=True,
    )


def _leaving(recorder: Recorder, _: None) -> None:
    for model, watched in _watched.items():
        if watched.examined:
            _emit_use(recorder, model, watched)


class CallWatch:
    """Notes which submodules that hold parameters are called, during one forward only: the hooks
    are gone before the user can copy, pickle or compile the module again.

    Attributes:
        owners: names of the modules that own parameters themselves.
        called: those that were called; seeing: of those that were called with gradients on.
    """

    def __init__(self) -> None:
        import torch

        self.owners: set[str] = set()
        self.seeing: set[str] = set()
        self._gradients_on = torch.is_grad_enabled
        self._handles: list[Any] = []
        self.called: set[str] = set()

    @classmethod
    def start(cls, model: Model) -> CallWatch | None:
        """None where watching could disturb: scripted or compiled modules."""
        import torch

        inner = model.inner()
        if inner is None or compiling():
            return None
        modules = list(inner.named_modules())
        if any(
            isinstance(m, torch.jit.ScriptModule) or hasattr(m, "_orig_mod") for _, m in modules
        ):
            return None
        watch = cls()
        for name, module in modules:
            if any(p is not None for p in module._parameters.values()):
                watch.owners.add(name)
            watch._handles.append(
                module.register_forward_pre_hook(shielded("unused.note", watch._note(name)))
            )
        return watch

    def _note(self, name: str) -> Any:
        def note(module: Any, args: Any) -> None:
            self.called.add(name)
            if self._gradients_on():
                self.seeing.add(name)

        return note

    def stop(self) -> frozenset[str]:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return frozenset(self.called)
