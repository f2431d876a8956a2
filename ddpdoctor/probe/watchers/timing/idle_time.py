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
from ...recording import torch_compat
from ...recording.hooks import Subscriptions
from ...recording.index_sample import halvings
from ...recording.patching import around
from ...recording.recorder import Recorder, shielded
from ...training import lifecycle, wrapped_models
from ...training.records import Backward, Step

LOST = "how long ranks wait for each other"

WINDOW = 8
"""Steps summarised in one record (by their median, so that one slow step does not count)."""

WINDOWS_IN_FULL = 24
"""First windows that are all measured; later ones more and more rarely."""

SHORTEST_S = 0.005
"""Shorter steps are not measured: the doctor's own time would be a visible part of them."""


class _BeforeBatch(NamedTuple):
    """The state of `_StepTimes` before a batch was loaded."""

    segment: int
    spent: list[float]
    waited: list[float]
    site: int


class _StepTimes:
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
        before: state before the last batch, until it is known what the batch is for.
        tried: that batch may be one to evaluate.
        fed: another batch came since the last phase that is to be trained on.
    """

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
        self.before: _BeforeBatch | None = None
        self.tried = self.fed = False

    def begin_step(self, now: float) -> None:
        """Start to measure the step that follows."""
        self.segment = 2 * len(PHASES) - 1
        self.since = now
        self.spent = [0.0] * (2 * len(PHASES))
        self.waited = [0.0] * (2 * len(PHASES))
        self.before, self.fed = None, False

    def add_elapsed(self, now: float) -> None:
        self.spent[self.segment] += now - self.since
        self.since = now

    def attribute_batch(self, *, followed: bool) -> None:
        """Decide what the last batch was for, and move its time if it was not trained on.

        Args:
            followed: another batch follows it; otherwise a phase of training does.
        """
        before, self.before = self.before, None
        if before is None:
            return
        if not self.tried or not (followed or self.fed):
            self.fed = True
            return
        now_spent, now_waited = sum(self.spent), sum(self.waited)
        self.segment, self.spent, self.waited, self.sites[0] = before
        self.spent[self.segment] += now_spent - sum(self.spent)
        self.waited[self.segment] += now_waited - sum(self.waited)


_times = _StepTimes()
_measuring = Subscriptions()


def install() -> None:
    from torch.nn.parallel.distributed import DistributedDataParallel

    _times.__init__()  # type: ignore[misc]
    call_hooks.waited.subscribe(_waited, lost=LOST)
    _measuring[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, enabled=False),
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, enabled=False),
        *(
            moment.subscribe(callback, lost=LOST, enabled=False)
            for moment, callback in (
                (lifecycle.loading_begins, _loading_begins),
                (lifecycle.loading_ends, _phase_ends),
                (lifecycle.forward_begins, _forward_begins),
                (lifecycle.forward_ends, _forward_ends),
                (lifecycle.backward_begins, _phase_begins(Phase.BACKWARD)),
                (lifecycle.backward_ends, _phase_ends),
                (lifecycle.step_begins, _phase_begins(Phase.OPTIMIZER)),
            )
        ),
    )
    lifecycle.step_ends.subscribe(_step_ends, lost=LOST)
    around(
        DistributedDataParallel,
        "_sync_buffers",
        before=_sync_buffers_begins,
        after=_sync_buffers_ends,
        lost=LOST,
        only=_times,
    )


def _phase_begins(phase: Phase) -> Callable[[Recorder, Any], None]:
    """A callback for the moment when the rank enters a phase."""
    segment = phase - Phase.DATA

    def enters(recorder: Recorder, moment: Any) -> None:
        if get_ident() == _times.thread:
            _times.add_elapsed(time.monotonic())
            _times.attribute_batch(followed=False)
            _times.fed = False
            _times.segment = segment
            _times.sites[segment] = moment.site

    return enters


def _loading_begins(recorder: Recorder, loading: Any) -> None:
    if get_ident() == _times.thread:
        _times.add_elapsed(time.monotonic())
        _times.attribute_batch(followed=True)
        _times.before = _BeforeBatch(
            _times.segment, _times.spent.copy(), _times.waited.copy(), _times.sites[0]
        )
        _times.tried = _evaluating()
        _times.segment, _times.sites[0] = 0, loading.site


def _evaluating() -> bool:
    import torch

    if not torch.is_grad_enabled():
        return True
    training = [m.training for model in wrapped_models.live() if (m := model.inner()) is not None]
    return bool(training) and not any(training)


_training_forward_begins = _phase_begins(Phase.FORWARD)


def _forward_begins(recorder: Recorder, forward: Any) -> None:
    if forward.grad_enabled:
        _training_forward_begins(recorder, forward)
    elif get_ident() == _times.thread:
        _times.tried = True


def _forward_ends(recorder: Recorder, forward: Any) -> None:
    if forward.grad_enabled:
        _phase_ends(recorder, forward)


def _phase_ends(recorder: Recorder, moment: Any) -> None:
    if get_ident() == _times.thread:
        _times.add_elapsed(time.monotonic())
        _times.segment = _times.segment % len(PHASES) + len(PHASES)


def _waited(recorder: Recorder, seconds: float) -> None:
    if _times.looking and get_ident() == _times.thread:
        _times.waited[_times.segment] += seconds


def _sync_buffers_begins(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    return time.monotonic()


def _sync_buffers_ends(
    recorder: Recorder, began: Any, result: Any, error: BaseException | None
) -> None:
    if began is not None:
        _waited(recorder, time.monotonic() - began)


class _FinalWait:
    """The end of a backward after all gradients are computed, in which DDP waits for its buckets.

    Attributes:
        handle: of the hook that runs when the backward starts.
        began: when all gradients were computed, 0 before.
    """

    handle: Any = None
    began = 0.0


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    _FinalWait.began = 0.0
    nodes = (root.grad_fn for root in backward.roots if hasattr(root, "grad_fn"))
    if (node := next((n for n in nodes if n is not None), None)) is not None:
        _FinalWait.handle = node.register_prehook(shielded("waits", _backward_runs, LOST))


def _backward_runs(gradients: Any) -> None:
    torch_compat.when_computed(shielded("waits", _gradients_computed, LOST))


def _gradients_computed() -> None:
    _FinalWait.began = time.monotonic()


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    handle, _FinalWait.handle = _FinalWait.handle, None
    if handle is not None:
        handle.remove()
        if _FinalWait.began:
            _waited(recorder, time.monotonic() - _FinalWait.began)


def _step_ends(recorder: Recorder, step: Step) -> None:
    optimizer = step.known.number
    if optimizer != _times.leader:
        _times.followers += 1
        if _times.leader >= 0 and _times.followers <= WINDOW:
            return  # several optimizers take turns: only the leader's steps are counted
        _times.leader, _times.rows, _times.looking = optimizer, [], False
        _measuring.disable()
    _times.followers = 0
    window, place = divmod(step.number + 1, WINDOW)
    if not _times.looking and place:
        return
    now = time.monotonic()
    if _times.looking:
        _times.add_elapsed(now)
        own = [max(0.0, s - w) for s, w in zip(_times.spent, _times.waited, strict=True)]
        _times.rows.append([sum(_times.spent), sum(_times.waited), *own])
        _times.begin_step(now)
    if place == 0:
        if len(_times.rows) == WINDOW:
            _emit(recorder, step)
        usual, _times.window_at = (now - _times.window_at) / WINDOW, now
        _times.rows = []
        due = window % (1 << halvings(window, WINDOWS_IN_FULL)) == 0
        _times.looking = due and usual >= SHORTEST_S
        _measuring.enable(_times.looking)
        if _times.looking:
            _times.thread = get_ident()
            _times.begin_step(now)
            _times.delayed_s = _delayed()


def _emit(recorder: Recorder, step: Step) -> None:
    wall, waiting, *own = (
        round(median_high(column), 6) for column in zip(*_times.rows, strict=True)
    )
    recorder.emit(
        Pace(
            at=_times.since,
            optimizer=step.known.number,
            step=step.number,
            count=WINDOW,
            wall_s=wall,
            waited_s=waiting,
            own_s=tuple(own),
            sites=tuple(_times.sites),
            delayed_s=round(max(0.0, _delayed() - _times.delayed_s) / WINDOW, 6),
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
