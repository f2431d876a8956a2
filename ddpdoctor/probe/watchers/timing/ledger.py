"""Where did every second of this rank go?

The ring adds up the time in each phase (`TimedRing`); this records the sums, often enough that the
ranks can be compared stretch by stretch.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import TimeLedger
from ...collectives import call_hooks
from ...collectives.call_log import call_log_of
from ...collectives.timed_ring import TimedRing
from ...recording import hooks
from ...recording.hooks import Light
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.records import Step
from .idle_time import IdleTime
from .sync_waits import SyncWaits

WINDOW = 8
"""Steps between two records. Which steps end a window depends on their number only, so that the
ranks record their sums at the same ones."""

WINDOWS = 64
"""After so many windows they become twice as long, and again each time the run has doubled."""

CLOSEST_S = 0.1
"""Records are at least that far apart."""

EVERY_S, EVERY_SHARE = 0.5, 0.02
"""Records are not much further apart than that, or than this share of the run so far: what is not
recorded is lost if the rank is killed."""

TIMED_S = 0.003
"""Backwards of shorter steps are not timed: it would cost a visible part of them."""


class Ledger(Watcher):
    """When the sums were recorded last.

    Attributes:
        first_at: when the first step ended; 0 before.
        recorded_at, recorded_step: of the last record.
        timed: all backwards since the last record were timed.
    """

    lost = "where the time goes"
    after = (IdleTime, SyncWaits)

    def __init__(self) -> None:
        self.first_at = 0.0
        self.recorded_at = 0.0
        self.recorded_step = -1
        self.timed = False

    def install(self) -> None:
        import torch

        self.around((torch.serialization, torch), "save", before=self._saves, after=self._saved)

    def _saves(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> tuple[float, int]:
        return time.monotonic(), recorder.site()

    def _saved(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is not None and (ring := _ring(recorder)):
            began, site = token
            ring.saved(time.monotonic() - began, site)

    @on(call_hooks.waited)
    def _waited(self, recorder: Recorder, seconds: float) -> None:
        if ring := _ring(recorder):
            ring.waited(seconds)

    @on(SyncWaits.averaged)
    def _averaged(self, recorder: Recorder, seconds: float) -> None:
        if log := recorder.call_log:
            log.ring.waited_before(seconds)

    @on(lifecycle.step_ends, light=Light.LEFT_OUT)
    def _step_ends(self, recorder: Recorder, step: Step) -> None:
        steps = recorder.step
        if steps % WINDOW:
            return
        now = time.monotonic()
        if not self.first_at:
            self.first_at = now
        if steps % _window(steps) == 0 and now - self.recorded_at >= CLOSEST_S:
            self._record(recorder)
        long = now - self.first_at >= TIMED_S * (steps - WINDOW) and steps > WINDOW
        SyncWaits.current.measure("ledger", long)
        self.timed &= long

    @on(lifecycle.pulse)
    def _pulse(self, recorder: Recorder, step: Step) -> None:
        now = time.monotonic()
        every = max(EVERY_S, EVERY_SHARE * (now - recorder.began))
        if now - self.recorded_at >= every:
            self._record(recorder)

    @on(hooks.leaving, lost="where the last seconds went")
    def _leaving(self, recorder: Recorder, _: None) -> None:
        self._record(recorder)

    def _record(self, recorder: Recorder) -> None:
        ring = _ring(recorder)
        if ring is None:
            return
        now, accounts = ring.accounts()
        self.recorded_at, self.recorded_step = now, recorder.step
        recorder.emit(
            TimeLedger(
                at=now,
                step=recorder.step,
                wall_s=round(now - recorder.began, 6),
                doctor_s=round(ring.doctor_s, 6),
                accounts=accounts,
                backwards_timed=self.timed,
            )
        )
        self.timed = SyncWaits.current.looking


def _ring(recorder: Recorder) -> TimedRing | None:
    log = recorder.call_log or call_log_of(recorder)
    return None if log is None else log.ring


def _window(steps: int) -> int:
    """The length of the windows after so many steps."""
    return WINDOW << max(0, (steps // (WINDOW * WINDOWS)).bit_length())
