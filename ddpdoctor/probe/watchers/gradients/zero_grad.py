"""Whether gradients are cleared between the steps of an optimizer."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ....events import Carried
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import shard
from ...recording.weak_references import Reference
from ...tensors.digests import readable
from ...tensors.gradient_versions import some, versions
from ...training import lifecycle
from ...training.records import Backward, Step

LOST = "whether gradients are cleared"

EMITTED_AT_MOST = 200

ENOUGH = 4
"""Looks in a row, of which each found cleared gradients, and then as many of which none did: a
program that clears in some steps only has its reasons."""

SMALL = 65536
"""Values of a gradient are looked at up to this size, to see one that was zeroed through `.data`,
which leaves no other trace."""


class Watched:
    """Some parameters of one optimizer, since its last step.

    Attributes:
        before: identity and version of the gradients, as the last step or backward left them;
            `filled` is a parameter whose gradient was not all zero then, None for none that was
            looked into.
        cleared: seen cleared since the step; `touched` by a backward before that, first at `site`.
        awake: its steps are looked at now.
        clears: looks so far that found them cleared, `latest` of which; `old`: others since,
            `first` of which.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = [Reference(p) for p in some(parameters)]
        self.before: list[tuple[int, int]] = []
        self.filled: weakref.ref[Any] | None = None
        self.cleared = True
        self.touched = False
        self.site = -1
        self.awake = True
        self.clears = self.old = 0
        self.latest: Carried | None = None
        self.first: Carried | None = None
        self.emitted: bool | None = None
        self.count = 0

    def state(self) -> list[tuple[int, int]]:
        return versions(self.parameters)

    def keep(self, now: list[tuple[int, int]]) -> None:
        """A step or a backward has left the gradients like this."""
        self.before = now
        self.filled = next((ref for ref in self.parameters if _any_value(ref)), None)

    def look(self) -> None:
        """Before a backward: were all the gradients dropped, overwritten or zeroed?"""
        pairs = zip(self.state(), self.before, strict=True)
        zeroed = self.filled is not None and _any_value(self.filled) is False
        if zeroed or any(now != then for now, then in pairs if then[1] >= 0):
            self.cleared = True


def _any_value(parameter: weakref.ref[Any]) -> bool | None:
    """Whether a gradient has a value that is not zero; None where it is not looked into."""
    grad = None if (p := parameter()) is None else shard(p.grad)
    if grad is None or not readable(grad) or not 0 < grad.numel() <= SMALL:
        return None
    return bool(grad.detach().count_nonzero())


class _Watching:
    """Optimizers of which it is not known yet whether their gradients are always cleared."""

    watched: list[tuple[weakref.ref[Any], Watched]] = []
    subscriptions = Subscriptions()


def install() -> None:
    _Watching.watched = []
    lifecycle.step_due.subscribe(_step_due, lost=LOST)
    _Watching.subscriptions[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, awake=False),
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, awake=False),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),
        lifecycle.step_ends.subscribe(_step_ends, lost=LOST, awake=False),
        lifecycle.closure_ends.subscribe(_closure_ends, lost=LOST, awake=False),
    )


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    for _, watched in _Watching.watched:
        if watched.awake and not watched.cleared:
            watched.look()


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    for _, watched in _Watching.watched:
        if watched.cleared or not watched.awake:
            continue
        now = watched.state()
        if now != watched.before:
            if not watched.touched:
                watched.touched, watched.site = True, backward.site
            watched.keep(now)


def _step_due(recorder: Recorder, step: Step) -> None:
    """An optimizer that is new is watched from now on; one that clears, up to the next step."""
    optimizer = step.optimizer()
    if (known := step.known.notes.get(Watched)) is not None:
        if known.parameters:
            _Watching.subscriptions.enable()
    elif optimizer is not None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in every if p.grad is not None or p.requires_grad]
        if not trained:
            return
        watched = step.known.notes[Watched] = Watched(trained)
        living = [(ref, w) for ref, w in _Watching.watched if ref() is not None]
        _Watching.watched = [*living, (step.optimizer, watched)]
        _Watching.subscriptions.enable()


def _step_begins(recorder: Recorder, step: Step) -> None:
    watched = step.known.notes.get(Watched)
    if watched is not None and watched.parameters and not step.closure:
        _judge(recorder, step, watched)


def _closure_ends(recorder: Recorder, step: Step) -> None:
    watched = step.known.notes.get(Watched)
    if watched is not None and watched.parameters:
        _judge(recorder, step, watched)


def _step_ends(recorder: Recorder, step: Step) -> None:
    watched = step.known.notes.get(Watched)
    if watched is None or not watched.parameters or not (watched.awake or step.due):
        return
    watched.awake = True
    watched.keep(watched.state())
    watched.touched, watched.site = False, -1
    watched.cleared = all(version < 0 for _, version in watched.before)


def _judge(recorder: Recorder, step: Step, watched: Watched) -> None:
    if not (step.number and watched.awake and (watched.touched or watched.cleared)):
        return
    event = Carried(
        at=time.monotonic(),
        optimizer=step.known.number,
        step=step.number,
        carried=not watched.cleared,
        site=step.site,
        backward_site=watched.site,
        parameters=len(watched.before),
    )
    if event.carried:
        watched.old += 1
        if watched.old == 1:
            watched.first = event
        if not watched.clears:
            _emit(recorder, watched, event)
        elif watched.clears < ENOUGH:
            _let_go(watched)
        elif watched.old == ENOUGH and watched.first is not None and watched.latest is not None:
            recorder.emit(watched.latest)  # steps between the two need not have been looked at
            _emit(recorder, watched, watched.first)
    else:
        _emit(recorder, watched, event)
        watched.latest = event
        watched.clears += 1
        if watched.old:
            _let_go(watched)
        elif not step.due:
            watched.awake = False
            _rest()


def _let_go(watched: Watched) -> None:
    """It clears in some steps: that is all there is to know."""
    watched.parameters = []
    _Watching.watched = [(ref, w) for ref, w in _Watching.watched if w is not watched]
    _rest()


def _rest() -> None:
    _Watching.subscriptions.enable(any(w.awake for _, w in _Watching.watched))


def _emit(recorder: Recorder, watched: Watched, event: Carried) -> None:
    if event.carried != watched.emitted and watched.count < EMITTED_AT_MOST:
        watched.emitted = event.carried
        watched.count += 1
        recorder.emit(event)
