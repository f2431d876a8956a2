"""Which parameters get no gradient in a backward, and which modules were called before it?

Looked at after backwards that were examined whole, and when DDP reports missing gradients. Calls of
submodules are watched only in a model's first forwards and after the set has changed.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

from ....events import ModulesSkipped, ParameterUse, UnusedParameters
from ...recording import hooks
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder, shielded
from ...recording.torch_compat import compiling, ready_indices, without_gradient
from ...recording.watcher import Watcher, on
from ...source.call_resolver import setting_in_frames
from ...source.source_text import always_mentioned, branch_around
from ...tensors.tensor_watch import grad_of
from ...training import lifecycle, optimizer_models
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from .limits import BRANCHES, UNUSED_IN_FULL, WATCHED_FORWARDS, WATCHES
from .unused_outputs import unused_results


class Watched:
    """The use of one model's parameters.

    Attributes:
        unused: positions of unused parameters recorded last; None before the first record.
        called: submodules called in the forwards since the last backward; None if unobserved.
        called_with_grad: those of them that were called with gradients enabled.
        skipped: submodules not called in a forward, those with parameters and those with buffers,
            as recorded last.
        watch: watches the current forward.
        due: of the next forwards, how many to watch.
        watches: forwards that may still be watched.
        emitted: records so far.
        shared: sets of parameters that one backward left out and another over the same forward
            reached.
        examined: synchronised backwards examined.
        counts: by position, in how many of these the parameter got no gradient.
        frozen: positions of parameters that were frozen in such a backward, and `thawed` those of
            them that were seen to require a gradient later (so many of them recorded).
    """

    def __init__(self) -> None:
        self.unused: tuple[int, ...] | None = None
        self.called: frozenset[str] | None = None
        self.called_with_grad: frozenset[str] = frozenset()
        self.skipped: tuple[set[str], set[str]] | None = None
        self.watch: CallWatch | None = None
        self.due = WATCHED_FORWARDS
        self.watches = WATCHES
        self.emitted = 0
        self.shared: set[tuple[int, ...]] = set()
        self.examined = 0
        self.counts: dict[int, int] = {}
        self.frozen: set[int] = set()
        self.thawed: set[int] = set()
        self.thawed_on_record = 0

    def so_far(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        """`called` and `called_with_grad`, including a forward that is still running: its backward
        may run inside it."""
        if self.watch is None or self.called is None:
            return self.called, self.called_with_grad
        return self.called | self.watch.called, self.called_with_grad | self.watch.called_with_grad

    def busy(self) -> bool:
        """Whether a forward is being watched, awaits its backward or is still to be watched."""
        return self.watch is not None or self.called is not None or self.expects()

    def expects(self) -> bool:
        """Whether the next forward is to be watched."""
        return self.due > 0 and self.watches > 0


class UnusedParameterWatch(Watcher):
    lost = "unused parameters"

    def __init__(self) -> None:
        self._watched: defaultdict[Model, Watched] = defaultdict(Watched)
        # Subscriptions to forwards, enabled while some are to be watched.
        self._calls = Subscriptions()

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        self._watched[model] = Watched()
        self._calls.enable()

    @on(lifecycle.forward_begins, during="_calls", enabled=True)
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        watched = self._watched[forward.model]
        if not forward.grad_enabled:
            return
        if watched.expects():
            watched.due, watched.watches = watched.due - 1, watched.watches - 1
            watched.watch = CallWatch.start(forward.model)
        if watched.watch is None:
            watched.called = None
            self._calls.enable(any(w.busy() for w in self._watched.values()))
        elif forward.model.pending == 1:
            watched.called = watched.called_with_grad = frozenset()

    @on(lifecycle.forward_ends, during="_calls", enabled=True)
    def _forward_ends(self, recorder: Recorder, forward: Forward) -> None:
        watched = self._watched[forward.model]
        watch, watched.watch = watched.watch, None
        if watch is not None:
            called = watch.stop()
            if watched.called is not None:
                watched.called |= called
                watched.called_with_grad |= watch.called_with_grad
            if forward.error is None:
                unread = set[str]()
                if getattr(forward.wrapper, "broadcast_buffers", True) is False:
                    unread = watch.holders - called
                _emit_skipped(recorder, forward.model, watched, watch.owners - called, unread)

    @on(lifecycle.forward_failed)
    def _forward_failed(self, recorder: Recorder, forward: Forward) -> None:
        self._note_thawed(recorder, forward.model)
        if "finished reduction in the prior iteration" in str(forward.error):
            self._learn_from_error(recorder, forward)

    def _learn_from_error(self, recorder: Recorder, forward: Forward) -> None:
        """Read the unused parameters of the last backward off the error that DDP raises in the next
        forward."""
        model = forward.model
        missing = without_gradient(str(forward.error))
        if not missing:
            # The fallback, since DDP keeps this order in its first iterations only.
            ready = ready_indices(forward.wrapper)
            missing = [i for i in range(len(model.expected)) if i not in ready] if ready else []
        unused = tuple(sorted(model.expected[i] for i in missing if i < len(model.expected)))
        watched = self._watched[model]
        if unused and unused != watched.unused:
            watched.examined += 1
            _count(watched, unused)
            watched.called = None
            self._emit(recorder, model, unused, model.synced_backwards, by_torch=True)

    @on(lifecycle.gradients_missing)
    def _gradients_missing(self, recorder: Recorder, missing: tuple[Model, int]) -> None:
        """A backward left DDP waiting: record which parameters have no gradient.

        DDP itself says so in the next forward, which this rank may not reach. If gradients are not
        set to None between steps, nothing is found here."""
        model, site = missing
        watched = self._watched.get(model)
        if watched is None or model.find_unused or model.static_graph:
            return
        waiting = ((i, model.parameters[i]()) for i in model.expected)
        unused = tuple(i for i, p in waiting if p is not None and p.grad is None)
        if unused and unused != watched.unused and unused not in watched.shared:
            model.left = unused
            self._emit(recorder, model, unused, model.synced_backwards, site)

    @on(lifecycle.gradients_ready)
    def _gradients_ready(self, recorder: Recorder, moment: tuple[Backward, Model]) -> None:
        backward, model = moment
        if model.unfinished:
            self._backward_continued(recorder, model, (), backward.site)
        elif self._watched[model].unused != ():
            self._emit(recorder, model, (), model.synced_backwards + 1, backward.site)

    @on(lifecycle.backward_examined)
    def _backward_examined(self, recorder: Recorder, backward: Backward) -> None:
        for model in backward.models:
            untouched = backward.untouched.get(model.number)
            if untouched is None or not backward.expected_sync[model.number]:
                continue
            watched = self._watched[model]
            self._note_thawed(recorder, model)
            watched.examined += 1
            if untouched not in watched.shared:
                self._examined(recorder, model, untouched, backward.site)
            _emit_use_if_due(recorder, model, watched)
        for model in backward.continued:
            if (untouched := backward.untouched.get(model.number)) is not None:
                self._backward_continued(recorder, model, untouched, backward.site)

    def _backward_continued(
        self, recorder: Recorder, model: Model, untouched: tuple[int, ...], site: int
    ) -> None:
        """Correct the record where another backward over the same forward reached parameters that
        the one before it had left out."""
        watched = self._watched[model]
        before = watched.unused
        if not before or before == untouched or not set(before).issuperset(untouched):
            return  # known to be shared
        watched.shared.add(before)
        for position in before:
            if (count := watched.counts.pop(position, 0) - 1) > 0:
                watched.counts[position] = count
        self._examined(recorder, model, untouched, site)
        _emit_use_if_due(recorder, model, watched)

    def _examined(
        self, recorder: Recorder, model: Model, untouched: tuple[int, ...], site: int
    ) -> None:
        watched = self._watched[model]
        _count(watched, untouched)
        if untouched and model.unsynced:
            untouched = _without_those_before(model, untouched)
        if untouched != watched.unused:
            self._emit(recorder, model, untouched, model.synced_backwards, site)

    def _emit(
        self,
        recorder: Recorder,
        model: Model,
        unused: tuple[int, ...],
        backward: int,
        site: int = -1,
        by_torch: bool = False,
    ) -> None:
        watched = self._watched[model]
        watched.unused = unused
        watched.emitted += 1
        if watched.emitted > UNUSED_IN_FULL:
            return
        if unused or watched.emitted > 1:
            watched.due = max(watched.due, 2)
            self._calls.enable()
        called, called_with_grad = watched.so_far()
        parameters = model.live_parameters() or []
        frozen = tuple(i for i in unused if parameters and not parameters[i].requires_grad)
        watched.frozen.update(frozen)
        step = optimizer_models.steps_of(model)
        total = max(0, model.backward_step) if by_torch else recorder.step
        if total < recorder.step:  # the error is about the backward before the last step
            step = max(0, step - 1)
        recorder.emit(
            UnusedParameters(
                at=time.monotonic(),
                model=model.number,
                backward=backward,
                step=step,
                indices=unused,
                called=None if called is None else tuple(sorted(called)),
                blind=tuple(sorted((called or frozenset()) - called_with_grad)),
                find_unused=model.find_unused,
                static_graph=model.static_graph,
                site=site,
                forward_site=model.forward_site,
                frozen=frozen,
                frozen_site=_frozen_site(recorder, model) if frozen and not by_torch else -1,
                by_torch=by_torch,
                branches=_branches(recorder, model, unused),
                total=total,
                unspent=() if by_torch else unused_results(recorder, model, unused),
            ),
            vital=True,
        )

    def _note_thawed(self, recorder: Recorder, model: Model) -> None:
        """Record frozen parameters that require a gradient again, as in a GAN that freezes one half
        for the step of the other: they are to be trained."""
        watched = self._watched[model]
        for position in watched.frozen - watched.thawed:
            parameter = model.parameters[position]()
            if parameter is not None and parameter.requires_grad:
                watched.thawed.add(position)
        if len(watched.thawed) != watched.thawed_on_record and watched.examined:
            _emit_use(recorder, model, watched)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for model, watched in self._watched.items():
            self._note_thawed(recorder, model)
            if watched.examined:
                _emit_use(recorder, model, watched)


def _emit_skipped(
    recorder: Recorder, model: Model, watched: Watched, skipped: set[str], holders: set[str]
) -> None:
    """Record skipped modules before the backward: this rank may hang in it."""
    if (skipped, holders) != watched.skipped:
        watched.skipped = skipped, holders
        recorder.emit(
            ModulesSkipped(
                at=time.monotonic(),
                model=model.number,
                backward=model.synced_backwards + 1,
                names=tuple(sorted(skipped)),
                site=model.forward_site,
                unread=_unread(model, holders),
            )
        )


def _unread(model: Model, holders: set[str]) -> tuple[str, ...]:
    """Of modules that were not called, those that the source of no other module reads always."""
    inner = model.inner()
    if inner is None or not holders:
        return ()
    kinds = {type(m) for m in inner.modules() if not type(m).__module__.startswith("torch.")}
    words = {name: [w for w in name.split(".") if not w.isdigit()] for name in holders}
    return tuple(
        sorted(n for n, found in words.items() if found and not always_mentioned(kinds, found[-1]))
    )


def _branches(recorder: Recorder, model: Model, unused: tuple[int, ...]) -> dict[str, int]:
    """Sites of the `if` statements around calls of the modules of unused parameters, by module."""
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


def _emit_use_if_due(recorder: Recorder, model: Model, watched: Watched) -> None:
    if watched.examined & (watched.examined - 1) == 0:
        _emit_use(recorder, model, watched)


def _without_those_before(model: Model, untouched: tuple[int, ...]) -> tuple[int, ...]:
    """Without parameters that have a gradient from a backward of the same step that was not
    synchronised, where DDP allows parameters to be unused."""
    if not (model.find_unused or model.static_graph):
        return untouched
    gradients = {p: grad_of(model.parameters[p]()) for p in untouched}
    return tuple(p for p, g in gradients.items() if g is None or (g.is_cpu and not g.any()))


def _count(watched: Watched, unused: tuple[int, ...]) -> None:
    for position in unused:
        watched.counts[position] = watched.counts.get(position, 0) + 1


def _frozen_site(recorder: Recorder, model: Model) -> int:
    """The line that froze parameters for this backward, -1 if none was found."""
    found = setting_in_frames(
        sys._getframe(1),
        lambda code: recorder.sites.kind(code) == "user",
        "requires_grad",
        False,
        after=model.made_at,
    )
    return recorder.sites.number(found.code, found.line) if found else -1


def _emit_use(recorder: Recorder, model: Model, watched: Watched) -> None:
    watched.thawed_on_record = len(watched.thawed)
    recorder.emit(
        ParameterUse(
            at=time.monotonic(),
            model=model.number,
            examined=watched.examined,
            backwards=model.synced_backwards,
            unused=dict(watched.counts),
            thawed=tuple(sorted(watched.thawed)),
        ),
        vital=True,
    )


class CallWatch:
    """Notes which submodules are called during one forward.

    The hooks are removed at its end, before the user can copy, pickle or compile the module.

    Attributes:
        owners: names of the modules that own parameters themselves; `holders`: buffers.
        called: names of those that were called.
        called_with_grad: names of those that were called with gradients enabled.
    """

    def __init__(self) -> None:
        import torch

        self.owners: set[str] = set()
        self.holders: set[str] = set()
        self.called_with_grad: set[str] = set()
        self._gradients_on = torch.is_grad_enabled
        self._handles: list[Any] = []
        self.called: set[str] = set()

    @classmethod
    def start(cls, model: Model) -> CallWatch | None:
        """Register the hooks; None for scripted or compiled modules, which hooks would disturb."""
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
            if any(b is not None for b in module._buffers.values()):
                watch.holders.add(name)
            watch._handles.append(
                module.register_forward_pre_hook(shielded("unused.note", watch._note(name)))
            )
        return watch

    def _note(self, name: str) -> Any:
        def note(module: Any, args: Any) -> None:
            self.called.add(name)
            if self._gradients_on():
                self.called_with_grad.add(name)

        return note

    def stop(self) -> frozenset[str]:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return frozenset(self.called)
