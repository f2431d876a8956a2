"""A rank's own time in each phase of a step, apart from its waiting for the other ranks.

Ranks that meet in every step all take equally long. Which of them the others wait for shows only
in the time that each spends outside of collectives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median_high
from threading import get_ident
from typing import Any, NamedTuple

from ....events import Pace
from ....events.pace import PHASES
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
"""Steps that are summed up in one record."""

WINDOWS_IN_FULL = 24
"""Later windows are looked at more and more rarely."""

SHORTEST_S = 0.005
"""Shorter steps are not looked at: nothing that matters can be lost in them."""


class _Before(NamedTuple):
    """How it stood before a batch was loaded, as in `_Time`."""

    segment: int
    spent: list[float]
    waited: list[float]
    site: int


class _Time:
    """Seconds since the step before, by segment: the phases, then what follows each of them.

    A batch that nothing is trained on (a validation between two steps) is no phase of the step: it
    belongs to the segment in which it is loaded.

    Attributes:
        looking: in this window; elsewhere nothing is measured.
        window_at: when it began.
        before: the last batch, while nothing has been trained on it; tried: it is one to evaluate.
        fed: since the last phase, another batch came that is to be trained on.
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
        self.before: _Before | None = None
        self.tried = self.fed = False

    def look(self, now: float) -> None:
        """A step is over: measure the next one."""
        self.segment = 2 * len(PHASES) - 1
        self.since = now
        self.spent = [0.0] * (2 * len(PHASES))
        self.waited = [0.0] * (2 * len(PHASES))
        self.before, self.fed = None, False

    def settle(self, now: float) -> None:
        self.spent[self.segment] += now - self.since
        self.since = now

    def judge(self, *, followed: bool) -> None:
        """What the last batch was for; `followed`: by another one, before anything is trained."""
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


_time = _Time()
_measuring = Subscriptions()


def install() -> None:
    from torch.nn.parallel.distributed import DistributedDataParallel

    _time.__init__()  # type: ignore[misc]
    call_hooks.waited.subscribe(_waited, lost=LOST)
    _measuring[:] = (
        lifecycle.backward_begins.subscribe(_backward_begins, lost=LOST, enabled=False),
        lifecycle.backward_ends.subscribe(_backward_ends, lost=LOST, enabled=False),
        *(
            moment.subscribe(callback, lost=LOST, enabled=False)
            for moment, callback in (
                (lifecycle.loading_begins, _loads),
                (lifecycle.loading_ends, _leaves),
                (lifecycle.forward_begins, _forward_begins),
                (lifecycle.forward_ends, _forward_ends),
                (lifecycle.backward_begins, _enters(Phase.BACKWARD)),
                (lifecycle.backward_ends, _leaves),
                (lifecycle.step_begins, _enters(Phase.OPTIMIZER)),
            )
        ),
    )
    lifecycle.step_ends.subscribe(_step_ends, lost=LOST)
    around(
        DistributedDataParallel,
        "_sync_buffers",
        before=_meeting,
        after=_met,
        lost=LOST,
        only=_time,
    )


def _enters(phase: Phase) -> Callable[[Recorder, Any], None]:
    """The rank goes over to another phase."""
    segment = phase - Phase.DATA

    def enters(recorder: Recorder, moment: Any) -> None:
        if get_ident() == _time.thread:
            _time.settle(time.monotonic())
            _time.judge(followed=False)
            _time.fed = False
            _time.segment = segment
            _time.sites[segment] = moment.site

    return enters


def _loads(recorder: Recorder, loading: Any) -> None:
    if get_ident() == _time.thread:
        _time.settle(time.monotonic())
        _time.judge(followed=True)
        _time.before = _Before(
            _time.segment, _time.spent.copy(), _time.waited.copy(), _time.sites[0]
        )
        _time.tried = _evaluating()
        _time.segment, _time.sites[0] = 0, loading.site


def _evaluating() -> bool:
    import torch

    if not torch.is_grad_enabled():
        return True
    training = [m.training for model in wrapped_models.live() if (m := model.inner()) is not None]
    return bool(training) and not any(training)


_trains = _enters(Phase.FORWARD)


def _forward_begins(recorder: Recorder, forward: Any) -> None:
    if forward.grad_enabled:
        _trains(recorder, forward)
    elif get_ident() == _time.thread:
        _time.tried = True


def _forward_ends(recorder: Recorder, forward: Any) -> None:
    if forward.grad_enabled:
        _leaves(recorder, forward)


def _leaves(recorder: Recorder, moment: Any) -> None:
    if get_ident() == _time.thread:
        _time.settle(time.monotonic())
        _time.segment = _time.segment % len(PHASES) + len(PHASES)


def _waited(recorder: Recorder, seconds: float) -> None:
    if _time.looking and get_ident() == _time.thread:
        _time.waited[_time.segment] += seconds


def _meeting(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return time.monotonic()


def _met(recorder: Recorder, began: Any, result: Any, error: BaseException | None) -> None:
    if began is not None:
        _waited(recorder, time.monotonic() - began)


class _Tail:
    """What is left of the running backward once every gradient has been computed: DDP waits."""

    handle: Any = None
    began = 0.0


def _backward_begins(recorder: Recorder, backward: Backward) -> None:
    _Tail.began = 0.0
    nodes = (root.grad_fn for root in backward.roots if hasattr(root, "grad_fn"))
    if (node := next((n for n in nodes if n is not None), None)) is not None:
        _Tail.handle = node.register_prehook(shielded("waits", _running, LOST))


def _running(gradients: Any) -> None:
    torch_compat.when_computed(shielded("waits", _computed, LOST))


def _computed() -> None:
    _Tail.began = time.monotonic()


def _backward_ends(recorder: Recorder, backward: Backward) -> None:
    handle, _Tail.handle = _Tail.handle, None
    if handle is not None:
        handle.remove()
        if _Tail.began:
            _waited(recorder, time.monotonic() - _Tail.began)


def _step_ends(recorder: Recorder, step: Step) -> None:
    optimizer = step.known.number
    if optimizer != _time.leader:
        _time.followers += 1
        if _time.leader >= 0 and _time.followers <= WINDOW:
            return  # several optimizers take turns: one of them counts the steps
        _time.leader, _time.rows, _time.looking = optimizer, [], False
        _measuring.disable()
    _time.followers = 0
    window, place = divmod(step.number + 1, WINDOW)
    if not _time.looking and place:
        return
    now = time.monotonic()
    if _time.looking:
        _time.settle(now)
        own = [max(0.0, s - w) for s, w in zip(_time.spent, _time.waited, strict=True)]
        _time.rows.append([sum(_time.spent), sum(_time.waited), *own])
        _time.look(now)
    if place == 0:
        if len(_time.rows) == WINDOW:
            _emit(recorder, step)
        usual, _time.window_at = (now - _time.window_at) / WINDOW, now
        _time.rows = []
        due = window % (1 << halvings(window, WINDOWS_IN_FULL)) == 0
        _time.looking = due and usual >= SHORTEST_S
        _measuring.enable(_time.looking)
        if _time.looking:
            _time.thread = get_ident()
            _time.look(now)
            _time.delayed_s = _delayed()


def _emit(recorder: Recorder, step: Step) -> None:
    wall, waiting, *own = (
        round(median_high(column), 6) for column in zip(*_time.rows, strict=True)
    )
    recorder.emit(
        Pace(
            at=_time.since,
            optimizer=step.known.number,
            step=step.number,
            count=WINDOW,
            wall_s=wall,
            waited_s=waiting,
            own_s=tuple(own),
            sites=tuple(_time.sites),
            delayed_s=round(max(0.0, _delayed() - _time.delayed_s) / WINDOW, 6),
        )
    )


def _delayed() -> float:
    """Seconds for which this thread has waited for a core so far; 0 where the kernel does not
    say."""
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
