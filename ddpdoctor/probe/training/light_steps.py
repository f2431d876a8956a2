"""Which steps on the fast path are light: in these the rank only marks its phase, its calls and the
time, counts, and looks whether the loss is finite and the backward communicated (see `LightRun`).

A run of light steps follows `EXAMINED` examined ones, as long as the budget asks for. Periods are
powers of two and begin at the same steps on every rank, so that ranks with other periods examine
steps in common.
"""

from __future__ import annotations

from typing import Any

from ...events.drift import full
from ...events.timing import LONGEST_LIGHT
from ..recording.hooks import Hook
from ..recording.limits import FIRST_STEPS
from ..recording.recorder import Recorder
from . import lifecycle
from .limits import EXAMINED, LONGEST_LIGHT_S, SHORTEST
from .steady_state import Plan

_HOOKS: tuple[Hook[Any], ...] = (
    lifecycle.loading_begins,
    lifecycle.loading_ends,
    lifecycle.forward_begins,
    lifecycle.forward_ends,
    lifecycle.backward_begins,
    lifecycle.backward_ends,
    lifecycle.step_begins,
    lifecycle.step_ends,
)


def watched() -> bool:
    """Whether some watcher wants every step now."""
    return any(hook.needed for hook in _HOOKS)


class _Mean:
    """The mean of a cost over the last steps, in nanoseconds; recent ones count more."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float, steps: int) -> None:
        """So many steps took `value` each. A pause between them is no cost: upwards it follows
        slowly."""
        if not self.value:
            self.value = value
            return
        weight = 1 - 0.9**steps
        self.value += (min(value, 4 * self.value) - self.value) * weight


class LightSteps:
    """Decides after each step on the fast path whether light ones follow.

    Attributes:
        period: examined and light steps together; `SHORTEST` also while all are examined.
        examined_ns, light_ns: what the doctor takes in a step of each kind; `step_ns`: what a whole
            step takes.
        steps: of the run of light steps that is going on; 0 if there is none.
        needed: to examine every step would exceed the budget.
    """

    def __init__(self) -> None:
        self.period = SHORTEST
        self.examined_ns, self.light_ns, self.step_ns = _Mean(), _Mean(), _Mean()
        self.steps = 0
        self.needed = False
        self._at = 0.0
        self._step = -1
        self._own = 0

    def after(self, recorder: Recorder, plan: Plan, step: int, now: float) -> int:
        """How many light steps follow an examined step, or the last of some light ones.

        Args:
            step: number of the step that is over; `now`: the time, in seconds.
        """
        self._measure(recorder, step, now)
        self.steps = 0
        if recorder.every or step < FIRST_STEPS:
            return 0
        if (step + 1) % self.period == EXAMINED - 1:
            self._choose(recorder)
        place = (step + 1) % self.period
        if place < EXAMINED - 1 or not self.needed or watched():
            return 0
        model = plan.model
        left = [self.period - place - 1]
        # Of the steps after the first ones, those that `full` chooses end in 99.
        left += [n for n in range(99 - (step + 1) % 100, left[0], 100) if full(step + 1 + n)]
        plan.examined()  # chooses `next_examined`
        left.append((model.next_examined - model.synced_backwards) // max(1, plan.syncs))
        self.steps = max(0, min(left))
        return self.steps

    def _measure(self, recorder: Recorder, step: int, now: float) -> None:
        """Learn what the steps since the last call cost: an examined one, or light ones."""
        steps, own = step - self._step, recorder.own_ns - self._own
        if self._step >= 0 and steps > 0:
            mean = self.light_ns if self.steps else self.examined_ns
            mean.add(own / steps, steps)
            self.step_ns.add(1e9 * (now - self._at) / steps, steps)
        self._step, self._own, self._at = step, recorder.own_ns, now

    def _choose(self, recorder: Recorder) -> None:
        """Choose the shortest period that the budget allows."""
        allowed = self.step_ns.value * recorder.budget_percent / 100
        examined = self.examined_ns.value
        light = self.light_ns.value or examined / 2
        most = min(LONGEST_LIGHT, LONGEST_LIGHT_S * 1e9 / max(1.0, self.step_ns.value))
        self.needed, self.period = examined > allowed, SHORTEST
        while 2 * self.period <= most:
            if EXAMINED * examined + (self.period - EXAMINED) * light <= allowed * self.period:
                break
            self.period *= 2
