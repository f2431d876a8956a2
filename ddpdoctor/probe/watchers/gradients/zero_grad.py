"""Are gradients cleared between the steps of an optimizer?

Identity and version of a few gradients are compared before and after backwards and steps, until it
is known whether the program always, never or sometimes clears them.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import msgspec

from ....events import Carried
from ...recording.devices import HostCopy, largest_later
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.torch_compat import shard
from ...recording.watcher import Watcher, on
from ...recording.weak_references import Reference
from ...tensors.digests import readable
from ...tensors.tensor_watch import NO_TENSOR, TensorWatch, grad_of, owner_marks, spread
from ...training import lifecycle
from ...training.records import Backward, Step
from .gradient_sync import GradientSync
from .limits import CLEARS_ASKED, CLEARS_EMITTED, CLEARS_ENOUGH, READ_UP_TO

LEFT = "left"


class WatchedGradients:
    """Some parameters of one optimizer, since its last step.

    Attributes:
        gradients: of these parameters, as the last step or backward left them (`LEFT`).
        filled: a parameter whose gradient was not all zero then; None if none was read.
        cleared: the gradients were cleared since the step.
        touched: a backward added to uncleared gradients; the first one is at `site`.
        awake: the next step is looked at.
        clears: steps with cleared gradients; `latest_clear` is the last one.
        carries: later steps with uncleared gradients; `first_carry` is the first of them.
        emitted: what was recorded last, None for nothing.
        asked: the largest value of a gradient before each backward since the step, where none could
            be read: whether they were zeroed through `.data` is known once the device answers. None
            for what it could not be asked.
        waiting: steps for which these answers are still to come.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = [Reference(p) for p in spread(parameters)]
        self.gradients = TensorWatch(range(len(self.parameters)), self._read, owner_marks)
        self.filled: weakref.ref[Any] | None = None
        self.cleared = True
        self.touched = False
        self.site = -1
        self.awake = True
        self.clears = self.carries = 0
        self.latest_clear: Carried | None = None
        self.first_carry: Carried | None = None
        self.emitted: bool | None = None
        self.count = 0
        self.asked: list[HostCopy | None] = []
        self.waiting: list[tuple[Carried, list[HostCopy], bool]] = []

    def _read(self, positions: list[int]) -> list[Any]:
        return [grad_of(self.parameters[position]()) for position in positions]

    def note_values(self) -> None:
        """After a step or a backward, find a gradient that is not zero."""
        self.filled = next((ref for ref in self.parameters if _any_value(ref)), None)

    def note_clear(self) -> None:
        """Before a backward, note whether all gradients were dropped, overwritten or zeroed."""
        left = self.gradients.noted(LEFT)
        zeroed = self.filled is not None and _any_value(self.filled) is False
        if zeroed or any(left[p] != NO_TENSOR for p in self.gradients.changed(LEFT)):
            self.cleared = True
        elif len(self.asked) <= CLEARS_ASKED:
            known = (shard(grad_of(ref())) for ref in self.parameters)
            there = [g for g in known if g is not None and g.numel() > 0]
            if there and not any(map(readable, there)):
                smallest = min(there, key=lambda g: int(g.numel()))
                full = len(self.asked) == CLEARS_ASKED
                self.asked.append(None if full else largest_later(smallest))


def _any_value(parameter: weakref.ref[Any]) -> bool | None:
    """Whether a gradient has a nonzero value; None if it is too large or on a device."""
    grad = shard(grad_of(parameter()))
    if grad is None or not readable(grad) or not 0 < grad.numel() <= READ_UP_TO:
        return None
    return bool(grad.detach().count_nonzero())


class ZeroGrad(Watcher):
    """The optimizers that are watched, until it is known whether they clear their gradients."""

    lost = "whether gradients are cleared"
    after = (GradientSync,)  # decides whether gradients were synchronised

    def __init__(self) -> None:
        self.watched: list[tuple[weakref.ref[Any], WatchedGradients]] = []
        self.subscriptions = Subscriptions()

    @on(lifecycle.backward_begins, during="subscriptions")
    def _backward_begins(self, recorder: Recorder, backward: Backward) -> None:
        for _, watched in self.watched:
            if watched.awake and not watched.cleared:
                watched.note_clear()

    @on(lifecycle.backward_ends, during="subscriptions")
    def _backward_ends(self, recorder: Recorder, backward: Backward) -> None:
        for _, watched in self.watched:
            if watched.cleared or not watched.awake:
                continue
            if watched.gradients.changed_again(LEFT):
                if not watched.touched:
                    watched.touched, watched.site = True, backward.site
                watched.note_values()

    @on(lifecycle.step_due)
    def _step_due(self, recorder: Recorder, step: Step) -> None:
        """Start to watch a new optimizer; look again at one that has always cleared so far."""
        optimizer = step.optimizer()
        if (known := step.known.notes.get(WatchedGradients)) is not None:
            if known.parameters:
                self.subscriptions.enable()
        elif optimizer is not None:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            trained = [p for p in every if p.grad is not None or p.requires_grad]
            if not trained:
                return
            watched = step.known.notes[WatchedGradients] = WatchedGradients(trained)
            living = [(ref, w) for ref, w in self.watched if ref() is not None]
            self.watched = [*living, (step.optimizer, watched)]
            self.subscriptions.enable()

    @on(lifecycle.step_begins, during="subscriptions")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        watched = step.known.notes.get(WatchedGradients)
        if watched is not None and watched.parameters and not step.closure:
            self._record_step(recorder, step, watched)

    @on(lifecycle.closure_ends, during="subscriptions")
    def _closure_ends(self, recorder: Recorder, step: Step) -> None:
        watched = step.known.notes.get(WatchedGradients)
        if watched is not None and watched.parameters:
            self._record_step(recorder, step, watched)

    @on(lifecycle.step_ends, during="subscriptions")
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        watched = step.known.notes.get(WatchedGradients)
        if watched is None or not watched.parameters or not (watched.awake or step.due):
            return
        watched.awake = True
        watched.gradients.keep(LEFT)
        watched.note_values()
        watched.touched, watched.site, watched.asked = False, -1, []
        watched.cleared = all(left == NO_TENSOR for left in watched.gradients.noted(LEFT).values())

    def _record_step(self, recorder: Recorder, step: Step, watched: WatchedGradients) -> None:
        if not (step.number and watched.awake and (watched.touched or watched.cleared)):
            return
        event = Carried(
            at=time.monotonic(),
            optimizer=step.known.number,
            step=step.number,
            carried=not watched.cleared,
            site=step.site,
            backward_site=watched.site,
            parameters=len(watched.parameters),
        )
        if event.carried and watched.asked:
            if None not in watched.asked:
                asked = [answer for answer in watched.asked if answer is not None]
                watched.waiting.append((event, asked, step.due))
        else:
            self._record(recorder, watched, event, due=step.due)
        while watched.waiting and all(answer.arrived() for answer in watched.waiting[0][1]):
            late, answers, due = watched.waiting.pop(0)
            late = msgspec.structs.replace(late, carried=all(bool(a.host) for a in answers))
            self._record(recorder, watched, late, due=due)

    def _record(
        self, recorder: Recorder, watched: WatchedGradients, event: Carried, *, due: bool
    ) -> None:
        if event.carried:
            watched.carries += 1
            if watched.carries == 1:
                watched.first_carry = event
            if not watched.clears:
                _emit(recorder, watched, event)
            elif watched.clears < CLEARS_ENOUGH:
                self._stop_watching(watched)
            elif (
                watched.carries == CLEARS_ENOUGH
                and watched.first_carry is not None
                and watched.latest_clear is not None
            ):
                # Shows from when on they are not cleared: not all steps between were looked at.
                recorder.emit(watched.latest_clear)
                _emit(recorder, watched, watched.first_carry)
        else:
            _emit(recorder, watched, event)
            watched.latest_clear = event
            watched.clears += 1
            if watched.carries:
                self._stop_watching(watched)
            elif not due:
                watched.awake = False
                self._disable_if_asleep()

    def _stop_watching(self, watched: WatchedGradients) -> None:
        """Drop an optimizer that clears in some steps only: it accumulates gradients on purpose."""
        watched.parameters = []
        self.watched = [(ref, w) for ref, w in self.watched if w is not watched]
        self._disable_if_asleep()

    def _disable_if_asleep(self) -> None:
        self.subscriptions.enable(any(w.awake for _, w in self.watched))


def _emit(recorder: Recorder, watched: WatchedGradients, event: Carried) -> None:
    if event.carried != watched.emitted and watched.count < CLEARS_EMITTED:
        watched.emitted = event.carried
        watched.count += 1
        recorder.emit(event)
