"""How much time does this rank spend in each phase of a step, without waiting for other ranks?

Ranks that synchronise in every step all take equally long per step. Which of them the others wait
for shows only in the time that each spends outside of collectives. Measured in windows of steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median_high
from threading import get_ident
from typing import Any, NamedTuple

from ....events import Pace
from ....events.timing import PHASES
from ....storage.call_ring import Phase
from ...collectives import call_hooks
from ...recording.hooks import Light, Subscriptions
from ...recording.index_sample import halvings
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...training import lifecycle
from ...training.records import Step
from ...training.wrapped_models import evaluating
from .sync_waits import SyncWaits

WINDOW = 8
"""Steps summarised in one record (by their median, so that one slow step does not count)."""

WINDOWS_IN_FULL = 16
"""First windows that are all measured; later ones more and more rarely."""

SHORTEST_S = 0.005
"""Shorter steps are not measured: the doctor's own time would be a visible part of them."""


class _BeforeBatch(NamedTuple):
    """The state of `IdleTime` before a batch was loaded."""

    segment: int
    spent: list[float]
    waited: list[float]
    site: int


class IdleTime(Watcher):
    """Seconds since the last step, by segment: each phase, then the time that follows each.

    A batch that is not trained on (a validation between two steps) is no phase of the step: its
    time belongs to the segment in which it is loaded.

    Attributes:
        thread: only this thread's moments are measured.
        looking: the current window is measured.
        window_at: begin of the window.
        segment, since: the current segment and when it was last added to `spent`.
        spent, waited: seconds by segment, and those of them spent waiting for other ranks.
        sites: line of each phase.
        leader: the optimizer whose steps are counted; `followers` steps of others since its last.
        rows: total time, waiting time and own time by segment, of each step in the window.
        delayed_s: see `_delayed`, at the begin of the window.
        previous: state before the last batch, until it is known what the batch is for.
        tried: that batch may be one to evaluate.
        fed: another batch came since the last phase that is to be trained on.
    """

    lost = SyncWaits.lost
    after = (SyncWaits,)

    def __init__(self) -> None:
        self.thread = get_ident()
        self.looking = False
        self.window_at = 0.0
        self.segment = 0
        self.since = 0.0
        self.spent = [0.0] * (2 * len(PHASES))
        self.waited = [0.0] * (2 * len(PHASES))
        self.sites = [-1] * len(PHASES)
        self.leader = -1
        self.followers = 0
        self.rows: list[list[float]] = []
        self.delayed_s = 0.0
        self.previous: _BeforeBatch | None = None
        self.tried = self.fed = False
        self._measuring = Subscriptions()
        self._training_forward_begins = self._phase_begins(Phase.FORWARD)

    def begin_step(self, now: float) -> None:
        """Start to measure the step that follows."""
        self.segment = 2 * len(PHASES) - 1
        self.since = now
        self.spent = [0.0] * (2 * len(PHASES))
        self.waited = [0.0] * (2 * len(PHASES))
        self.previous, self.fed = None, False

    def add_elapsed(self, now: float) -> None:
        self.spent[self.segment] += now - self.since
        self.since = now

    def attribute_batch(self, *, followed: bool) -> None:
        """Decide what the last batch was for, and move its time if it was not trained on.

        Args:
            followed: another batch follows it; otherwise a phase of training does.
        """
        before, self.previous = self.previous, None
        if before is None:
            return
        if not self.tried or not (followed or self.fed):
            self.fed = True
            return
        now_spent, now_waited = sum(self.spent), sum(self.waited)
        self.segment, self.spent, self.waited, self.sites[0] = before
        self.spent[self.segment] += now_spent - sum(self.spent)
        self.waited[self.segment] += now_waited - sum(self.waited)

    def install(self) -> None:
        self._measuring[:] = (
            *(
                moment.subscribe(callback, lost=self.lost, enabled=False)
                for moment, callback in (
                    (lifecycle.loading_begins, self._loading_begins),
                    (lifecycle.loading_ends, self._phase_ends),
                    (lifecycle.forward_begins, self._forward_begins),
                    (lifecycle.forward_ends, self._forward_ends),
                    (lifecycle.backward_begins, self._phase_begins(Phase.BACKWARD)),
                    (lifecycle.backward_ends, self._phase_ends),
                    (lifecycle.step_begins, self._phase_begins(Phase.OPTIMIZER)),
                )
            ),
        )

    def _phase_begins(self, phase: Phase) -> Callable[[Recorder, Any], None]:
        """A callback for the moment when the rank enters a phase."""
        segment = phase - Phase.DATA

        def enters(recorder: Recorder, moment: Any) -> None:
            if get_ident() == self.thread:
                self.add_elapsed(time.monotonic())
                self.attribute_batch(followed=False)
                self.fed = False
                self.segment = segment
                self.sites[segment] = moment.site

        return enters

    def _loading_begins(self, recorder: Recorder, loading: Any) -> None:
        if get_ident() == self.thread:
            self.add_elapsed(time.monotonic())
            self.attribute_batch(followed=True)
            self.previous = _BeforeBatch(
                self.segment, self.spent.copy(), self.waited.copy(), self.sites[0]
            )
            self.tried = evaluating()
            self.segment, self.sites[0] = 0, loading.site

    def _forward_begins(self, recorder: Recorder, forward: Any) -> None:
        if forward.grad_enabled:
            self._training_forward_begins(recorder, forward)
        elif get_ident() == self.thread:
            self.tried = True

    def _forward_ends(self, recorder: Recorder, forward: Any) -> None:
        if forward.grad_enabled:
            self._phase_ends(recorder, forward)

    def _phase_ends(self, recorder: Recorder, moment: Any) -> None:
        if get_ident() == self.thread:
            self.add_elapsed(time.monotonic())
            self.segment = self.segment % len(PHASES) + len(PHASES)

    @on(call_hooks.waited)
    @on(SyncWaits.averaged)
    def _waited(self, recorder: Recorder, seconds: float) -> None:
        if self.looking and get_ident() == self.thread:
            self.waited[self.segment] += seconds

    @on(lifecycle.step_ends, light=Light.LEFT_OUT)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        optimizer = step.known.number
        if optimizer != self.leader:
            self.followers += 1
            if self.leader >= 0 and self.followers <= WINDOW:
                return  # several optimizers take turns: only the leader's steps are counted
            self.leader, self.rows, self.looking = optimizer, [], False
            self._measuring.disable()
            SyncWaits.current.measure("idle time", False)
        self.followers = 0
        window, place = divmod(step.number + 1, WINDOW)
        if not self.looking and place:
            return
        now = time.monotonic()
        if self.looking:
            self.add_elapsed(now)
            own = [max(0.0, s - w) for s, w in zip(self.spent, self.waited, strict=True)]
            self.rows.append([sum(self.spent), sum(self.waited), *own])
            self.begin_step(now)
        if place == 0:
            if len(self.rows) == WINDOW:
                self._emit(recorder, step)
            usual, self.window_at = (now - self.window_at) / WINDOW, now
            self.rows = []
            due = window % (1 << halvings(window, WINDOWS_IN_FULL)) == 0
            self.looking = due and usual >= SHORTEST_S
            self._measuring.enable(self.looking)
            SyncWaits.current.measure("idle time", self.looking)
            if self.looking:
                self.thread = get_ident()
                self.begin_step(now)
                self.delayed_s = _delayed()

    def _emit(self, recorder: Recorder, step: Step) -> None:
        wall, waiting, *own = (
            round(median_high(column), 6) for column in zip(*self.rows, strict=True)
        )
        recorder.emit(
            Pace(
                at=self.since,
                optimizer=step.known.number,
                step=step.number,
                count=WINDOW,
                wall_s=wall,
                waited_s=waiting,
                own_s=tuple(own),
                sites=tuple(self.sites),
                delayed_s=round(max(0.0, _delayed() - self.delayed_s) / WINDOW, 6),
            )
        )


def _delayed() -> float:
    """Seconds that this thread has waited for a CPU core so far; 0 if the kernel does not tell."""
    try:
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(fd, 100).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
    finally:
        os.close(fd)
