"""DDP's synchronisation going wrong: marked ready twice, a static graph that is none."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from types import CodeType

from ..events import ReadyTwice, StaticGraphBroken
from . import models, moments
from .models import Model
from .moments import Backward, Forward
from .recorder import Recorder
from .sources import call_named

LOST = "errors of DDP's synchronisation"

TWICE = "mark a variable ready only once"
CHANGED = "training graph has changed"
ASSERTED = "expect_autograd_hooks_"
PARAMETER = re.compile(r"Parameter at index (\d+)(?: with name (\S+))?")


class Watch:
    """What is known of one model.

    Attributes:
        unsynced_site: the line of the last forward under `no_sync`, `unsynced` how many there were.
        backwards: backwards that reached the model since its last forward.
    """

    def __init__(self) -> None:
        self.unsynced = 0
        self.unsynced_site = -1
        self.forwards = 0
        self.backwards = 0
        self.silent = 0


_watches: defaultdict[Model, Watch] = defaultdict(Watch)


def install() -> None:
    _watches.clear()
    moments.forward_begins.subscribe(_forward_begins, lost=LOST)
    moments.forward_ends.subscribe(_forward_ends, lost=LOST)
    moments.backward_ends.subscribe(_backward_ends, lost=LOST)


def _forward_begins(active: Recorder, forward: Forward) -> None:
    watch = _watches[forward.model]
    if not forward.grad_enabled:
        return
    if watch.backwards:
        watch.forwards = watch.backwards = 0
    watch.forwards += 1
    if not forward.sync:
        watch.unsynced, watch.unsynced_site = watch.unsynced + 1, forward.site


def _forward_ends(active: Recorder, forward: Forward) -> None:
    if forward.error is not None:
        _judge_static(active, forward.model, str(forward.error), -1)


def _backward_ends(active: Recorder, backward: Backward) -> None:
    if backward.error is not None:
        text = str(backward.error)
        if TWICE in text:
            _tell_twice(active, backward, text)
        for model in models.live():
            _judge_static(active, model, text, backward.site)
        return
    for model in [*backward.models, *(m for m, _ in backward.unannounced)]:
        _watches[model].backwards += 1
    for model in backward.models:
        silent = model.number not in backward.synced
        if model.static_graph and silent and backward.expected_sync[model.number]:
            watch = _watches[model]
            watch.silent += 1
            if watch.silent & (watch.silent - 1) == 0:
                _tell_static(active, model, "silent", backward.site)


def _judge_static(active: Recorder, model: Model, text: str, site: int) -> None:
    if model.static_graph and (CHANGED in text or ASSERTED in text):
        _tell_static(active, model, "changed" if CHANGED in text else "asserted", site)


def _tell_static(active: Recorder, model: Model, kind: str, site: int) -> None:
    watch = _watches[model]
    active.emit(
        StaticGraphBroken(
            at=time.monotonic(),
            model=model.number,
            kind=kind,
            step=active.step,
            backward=model.synced_backwards,
            silent=watch.silent,
            unsynced=watch.unsynced,
            unsynced_site=watch.unsynced_site,
            site=site,
            forward_site=model.forward_site,
        ),
        vital=True,
    )


def _tell_twice(active: Recorder, backward: Backward, text: str) -> None:
    model = _whose(backward, text)
    if model is None:
        return
    watch = _watches[model]
    found = PARAMETER.search(text)
    name = (found.group(2) or "").rstrip(".,") if found else ""
    if found and not name and int(found.group(1)) < len(model.expected):
        name = model.names[model.expected[int(found.group(1))]]
    counts = backward.fired.get(model.number, {})
    active.emit(
        ReadyTwice(
            at=time.monotonic(),
            model=model.number,
            step=active.step,
            parameter=name.removeprefix("."),
            twice=tuple(model.names[i] for i, n in sorted(counts.items()) if n > 1),
            nested=backward.nested,
            forwards=watch.forwards,
            backwards=watch.backwards,
            find_unused=model.find_unused,
            static_graph=model.static_graph,
            site=backward.site,
            forward_site=model.forward_site,
            checkpoint_site=_checkpoint_site(active, model) if backward.nested else -1,
        ),
        vital=True,
    )


def _whose(backward: Backward, text: str) -> Model | None:
    """The model that torch complains about: the one that waits, or has the parameter it names."""
    live = models.live()
    found = PARAMETER.search(text)
    named = found.group(2).rstrip(".,") if found and found.group(2) else ""
    having = [m for m in live if named.removeprefix(".") in m.names] if named else []
    waiting = [m for m in live if m.pending or backward.fired.get(m.number)]
    return next(iter([m for m in having if m in waiting] or having or waiting or live), None)


def _checkpoint_site(active: Recorder, model: Model) -> int:
    """The user's line that checkpoints a part of the model."""
    inner = model.inner()
    for module in inner.modules() if inner is not None else ():
        found: tuple[CodeType, int] | None = call_named(
            module, ("checkpoint", "checkpoint_sequential")
        )
        if found is not None and active.sites.kind(found[0]) == "user":
            return active.sites.number(*found)
    return -1
