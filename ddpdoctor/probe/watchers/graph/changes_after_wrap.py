"""Which parameters of a model are no longer what DDP got at the wrap?

They may have been added, replaced, removed, tied, cast, moved, frozen or unfrozen. Looked at before
forwards; recorded when a backward shows the effect.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ....events import ParametersChanged
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import ignored_by_ddp, without_gradient
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import Reference
from ...source.call_resolver import setting_in_frames
from ...training import lifecycle, optimizer_models
from ...training.accumulate_grad import nodes_of
from ...training.module_origins import ModuleOrigins
from ...training.records import Backward, Forward
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels
from .limits import CALLS_KEPT, CHANGES_EVERY, CHANGES_FIRST, CHANGES_FIRST_OF_FEW, FEW_PARAMETERS

WITHOUT_GRADIENT = ("frozen", "removed", "tied")
"""Kinds of change that leave DDP waiting for a gradient that does not come."""


@dataclass
class Change:
    """A change of one kind; `names` are of the parameters, `site` the line that made it."""

    kind: str
    names: tuple[str, ...]
    parameters: list[weakref.ref[Any]]
    site: int = -1


@dataclass
class Watch:
    """The changes of one model.

    Attributes:
        registrations: the process-wide count of registered parameters at the last full comparison.
        found: changes whose effect a backward has yet to show.
        emitted: kind and names of changes on record.
        sites: lines that set flags, by kind, names and line of the forward. Searching one takes
            long, and a GAN sets flags twice per step.
    """

    registrations: int = -1
    found: list[Change] = field(default_factory=list)
    emitted: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    sites: dict[tuple[str, tuple[str, ...], int], int] = field(default_factory=dict)


class ChangesAfterWrap(Watcher):
    """Calls of `Module.requires_grad_` since the first wrap: module, flag, site."""

    lost = "parameters that change after the wrap"

    def __init__(self) -> None:
        self.made: list[tuple[weakref.ref[Any], bool, int]] = []
        self.applying = 0
        self._watches: defaultdict[Model, Watch] = defaultdict(Watch)
        # Enabled while changes are pending: they may be reverted, or a backward shows their
        # effect.
        self._pending_changes = Subscriptions()

    def install(self) -> None:
        import torch.nn

        self.made, self.applying = [], 0
        self.around(torch.nn.Module, "_apply", before=self._apply_begins, after=self._apply_ends)
        self.around(torch.nn.Module, "requires_grad_", before=self._requires_grad_called)

    def _requires_grad_called(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        if WrappedModels.current.live() and len(self.made) < CALLS_KEPT:
            flag = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
            self.made.append((weakref.ref(args[0]), flag, recorder.site()))

    def _apply_begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        """Note the AccumulateGrad nodes of parameters before they are cast or moved: that may give
        them new nodes, which lack DDP's hook."""
        self.applying += 1
        live = WrappedModels.current.live() if self.applying == 1 else []
        inside = {id(m) for m in args[0].modules()} if live else set()
        before = []
        for model in live:
            inner, parameters = model.inner(), model.live_parameters()
            if inner is None or parameters is None:
                continue
            if id(inner) in inside or any(id(m) in inside for m in inner.modules()):
                before.append((model, parameters, nodes_of(parameters)))
        return before

    def _apply_ends(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        self.applying -= 1
        for model, parameters, nodes in before or ():
            now = nodes_of(parameters)
            lost = [i for i in model.expected if now[i] is not nodes[i]]
            if lost:
                names = tuple(model.names[i] for i in lost)
                change = Change(
                    "converted", names, [model.parameters[i] for i in lost], recorder.site()
                )
                self._watches[model].found.append(change)
                self._pending_changes.enable()

    @on(lifecycle.forward_due)
    def _forward_due(self, recorder: Recorder, forward: Forward) -> None:
        model = forward.model
        if not forward.sync:
            return
        watch = self._watches[model]
        # A power of two from 4 on: `lifecycle.looked_at` selects forwards by powers of two as well.
        turns = 1 << (3 + len(model.parameters) // FEW_PARAMETERS).bit_length()
        first = (
            CHANGES_FIRST_OF_FEW if len(model.parameters) <= 2 * FEW_PARAMETERS else CHANGES_FIRST
        )
        if (
            watch.registrations != ModuleOrigins.current.registrations
            or model.forwards % (turns * CHANGES_EVERY) == 0
        ):
            watch.registrations = ModuleOrigins.current.registrations
            self._look_whole(recorder, forward, watch)
        elif model.forwards <= first or model.forwards % turns == 0:
            self._look_at_flags(recorder, forward, watch)
        self._pending_changes.enable(any(w.found for w in self._watches.values()))

    @on(lifecycle.forward_begins, during="_pending_changes")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        if forward.grad_enabled and forward.sync:
            self._look_at_flags(recorder, forward, self._watches[forward.model])

    def _look_at_flags(self, recorder: Recorder, forward: Forward, watch: Watch) -> None:
        model = forward.model
        for flag in (True, False):
            changed = [
                i
                for i, (ref, was) in enumerate(zip(model.parameters, model.trainable, strict=True))
                if was is not flag
                and (p := ref()) is not None
                and p.requires_grad is flag
                and i not in model.ignored
            ]
            names = tuple(model.names[i] for i in changed)
            kind = "unfrozen" if flag else "frozen"
            if names and (kind, names) not in watch.emitted:
                place = (kind, names, forward.site)
                if place not in watch.sites and len(watch.sites) < CALLS_KEPT:
                    watch.sites[place] = self._flag_site(recorder, model, changed, flag)
                site = watch.sites.get(place, -1)
                watch.found = [c for c in watch.found if c.kind != kind]
                watch.found.append(
                    Change(kind, names, [model.parameters[i] for i in changed], site)
                )
            elif not names:
                watch.found = [c for c in watch.found if c.kind != kind]

    def _flag_site(self, recorder: Recorder, model: Model, changed: list[int], flag: bool) -> int:
        """The line that set `requires_grad`: a recorded call of `Module.requires_grad_`, or else an
        assignment in the source of the running functions."""
        ids = {id(model.parameters[i]()) for i in changed}
        for reference, to, site in reversed(self.made):
            module = reference()
            if module is not None and to is flag and any(id(p) in ids for p in module.parameters()):
                return site
        found = setting_in_frames(
            sys._getframe(1),
            lambda code: recorder.sites.kind(code) == "user",
            "requires_grad",
            flag,
            after=model.made_at,
        )
        return recorder.sites.number(found.code, found.line) if found else -1

    def _look_whole(self, recorder: Recorder, forward: Forward, watch: Watch) -> None:
        model = forward.model
        inner = model.inner()
        if inner is None:
            return
        self._look_at_flags(recorder, forward, watch)
        known = {id(ref()) for ref in model.parameters}
        ignored = ignored_by_ddp(inner)
        owners = dict(inner.named_modules())
        kinds: dict[str, list[tuple[str, Any]]] = {}
        for name, parameter in inner.named_parameters():
            if id(parameter) in known or not parameter.requires_grad or name in ignored:
                continue
            kind = "replaced" if name in model.names else "added"
            kinds.setdefault(kind, []).append((name, parameter))
        for kind, listed in (kinds or _missing_parameters(model, inner)).items():
            names = tuple(n for n, _ in listed)
            if (kind, names) in watch.emitted or any(c.names == names for c in watch.found):
                continue
            owner, _, last = names[0].rpartition(".")
            module = owners.get(owner)
            site = -1 if module is None else ModuleOrigins.current.added_site(module, last)
            watch.found.append(Change(kind, names, [Reference(p) for _, p in listed], site))

    @on(lifecycle.forward_failed)
    def _forward_failed(self, recorder: Recorder, forward: Forward) -> None:
        if "finished reduction in the prior iteration" in str(forward.error):
            model, watch = forward.model, self._watches[forward.model]
            self._look_whole(recorder, forward, watch)
            positions = (i for i in without_gradient(str(forward.error)) if i < len(model.expected))
            without = {model.names[model.expected[i]] for i in positions}
            for change in list(watch.found):
                # A frozen parameter that had a gradient in that backward was frozen after it, as
                # GANs do between their two backwards.
                if change.kind != "frozen" or without.issuperset(change.names):
                    _emit(recorder, model, watch, change, communicated=False)

    @on(lifecycle.backward_ends, during="_pending_changes")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        for model, watch in list(self._watches.items()):
            reached = model in backward.models
            # A backward that reached no parameter DDP knows counts if the model waits for one: the
            # changes may be the reason.
            if not (backward.expected_sync[model.number] if reached else model.pending_sync):
                continue
            for change in list(watch.found):
                if reached or change.kind not in WITHOUT_GRADIENT:
                    _emit(recorder, model, watch, change, model.number in backward.synced)


def _missing_parameters(model: Model, inner: Any) -> dict[str, list[tuple[str, Any]]]:
    """Parameters that DDP waits for and the model no longer has, by kind of change: name, and the
    parameter now under that name or else the old one."""
    now = dict(inner.named_parameters(remove_duplicate=False))
    there = {id(p) for p in now.values()}
    kinds: dict[str, list[tuple[str, Any]]] = {}
    for position in model.expected:
        name, parameter = model.names[position], model.parameters[position]()
        # In a forward DDP makes a DTensor of what it keeps of one, and leaves it in the module.
        if hasattr(parameter, "_st_info"):
            continue
        if parameter is not None and id(parameter) not in there:
            kind = "tied" if name in now else "removed"
            kinds.setdefault(kind, []).append((name, now.get(name, parameter)))
    return kinds


def _emit(
    recorder: Recorder, model: Model, watch: Watch, change: Change, communicated: bool
) -> None:
    live = [(n, ref()) for n, ref in zip(change.names, change.parameters, strict=True)]
    trained = sum(p is not None and p.grad is not None for _, p in live)
    if change.kind not in WITHOUT_GRADIENT and not trained:
        return  # it has no effect until a loss uses the parameter
    watch.found.remove(change)
    watch.emitted.add((change.kind, change.names))
    recorder.emit(
        ParametersChanged(
            at=time.monotonic(),
            model=model.number,
            kind=change.kind,
            names=change.names,
            trained=trained,
            communicated=communicated,
            step=optimizer_models.steps_of(model),
            site=change.site,
            forward_site=model.forward_site,
            find_unused=model.find_unused,
        ),
        vital=True,
    )
