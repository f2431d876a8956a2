"""Which steps are sampled, and which share of the tensors: what the budget allows, chosen so that
all ranks have samples in common."""

from __future__ import annotations

import time

from ...events.drift import EARLY, full
from .devices import HOST_LAUNCH_NS, Work
from .limits import (
    BUDGET_SHARE,
    CHOSEN_ANEW,
    FIRST_NS,
    FIRST_STEPS,
    FIXED_NS,
    LEAST_SHARE,
    PER_DOUBLING,
    SPARSE_AFTER,
    TENSOR_NS,
    WIDEST,
)
from .recorder import Recorder


class Cost:
    """What digests cost from now on.

    On a device the host waits in a launch while the queue is full, as it would in the program's
    next one: that is not counted, what the device itself works is.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began, self._worked = time.perf_counter_ns(), Work.ns

    def ns(self, tensors: int) -> int:
        """Nanoseconds so far, of so many digests."""
        spent, worked = time.perf_counter_ns() - self._began, Work.ns - self._worked
        if not worked:
            return spent
        counted = min(spent, FIXED_NS + tensors * HOST_LAUNCH_NS)
        self._recorder.own_ns -= spent - counted
        return int(counted + worked)


class Pace:
    """Chooses the steps and tensors that are sampled for one optimizer and model.

    Strides and intervals are powers of two and counted from step 0, so that ranks that choose
    different ones still have steps and tensors in common.

    Attributes:
        stride: one tensor in so many is sampled; one step in `2 ** thin`.
        step_ns: running average of the nanoseconds of a step; `others_ns` of what the rest of the
            doctor takes in it; `tensor_ns` of one digest.
    """

    def __init__(self, recorder: Recorder, tensors: int) -> None:
        self.tensors = max(1, tensors)
        self.every = recorder.every
        self.recorder = recorder
        self.percent = recorder.budget_percent
        self.step_ns = 0.0
        self.others_ns = 0.0
        self.tensor_ns = TENSOR_NS
        self.stride = 1
        self.thin = 0
        self._last = 0
        self._last_step = 0
        self._between = 0
        self._own = 0
        self._spent = 0
        self._most = 1 << (self.tensors.bit_length() - 1)

    def skips(self, step: int) -> bool:
        """Whether this step is certainly not sampled; cheaper than `stride_at`."""
        # After the first steps, those that `full` chooses end in 99.
        return step & self._between != 0 and step > FIRST_STEPS and (step + 1) % 100 != 0

    def next_after(self, step: int) -> int:
        """The next step that may be sampled."""
        return next(n for n in range(step + 1, step + 2 + CHOSEN_ANEW) if not self.skips(n))

    def stride_at(self, step: int, kinds: int, sharers: int) -> int:
        """One tensor in how many is sampled in this step; 0 for none.

        Args:
            kinds: how many tensors are digested per parameter (the parameter, its gradient, ...).
            sharers: how many `Pace` share the budget.
        """
        self._measure_steps(step)
        if self.every > 0:  # the user's choice; `_between` stays 0, so that `skips` never holds
            return 1 if step % self.every == 0 else 0
        if step in EARLY:
            return 1
        if step < CHOSEN_ANEW or step % CHOSEN_ANEW == 0:
            self._choose(kinds, sharers)
        if full(step) and self._full_ns(kinds) <= self._allowed(sharers) * step:
            return 1
        if step < FIRST_STEPS:
            return min(self.stride, self._stride_for(FIRST_NS, kinds, nominal=True))
        thin = max(self.thin, (step // SPARSE_AFTER).bit_length())
        thin = min(thin, (step // PER_DOUBLING).bit_length() - 1)
        self._between = min(1 << thin, CHOSEN_ANEW) - 1
        if step & ((1 << thin) - 1):
            return 0
        return max(self.stride, 1 << max(0, (self.tensors - 1) // WIDEST).bit_length())

    def spent(self, nanoseconds: int, tensors: int) -> None:
        """Learn what a sampled step cost."""
        self._spent += nanoseconds
        if tensors:
            # 500 ns: never believe a digest to be free because the clock was coarse.
            each = max(500.0, (nanoseconds - FIXED_NS) / tensors)
            self.tensor_ns += (each - self.tensor_ns) * 0.2

    def _measure_steps(self, step: int) -> None:
        """Update the average time of a step, over the steps since the last call."""
        now, count = time.perf_counter_ns(), max(1, step - self._last_step)
        if self._last:
            took = (now - self._last) / count
            # Pauses (evaluation, a checkpoint) are not steps: follow upwards slowly.
            capped = min(took, 4 * self.step_ns) if self.step_ns else took
            weight = 1 - 0.9**count
            self.step_ns += (capped - self.step_ns) * (weight if self.step_ns else 1.0)
            others = (self.recorder.own_ns - self._own - self._spent) / count
            self.others_ns += (others - self.others_ns) * (weight if self.others_ns else 1.0)
        self._last, self._own, self._spent = now, self.recorder.own_ns, 0
        self._last_step = step

    def _allowed(self, sharers: int) -> float:
        """Nanoseconds per step that this `Pace` may take."""
        budget = self.step_ns * self.percent / 100
        left = min(budget * BUDGET_SHARE, budget - self.others_ns)
        return max(budget * LEAST_SHARE, left) / max(1, sharers)

    def _full_ns(self, kinds: int) -> float:
        return FIXED_NS + self.tensor_ns * self.tensors * kinds

    def _choose(self, kinds: int, sharers: int) -> None:
        """Choose the smallest stride and interval within the budget; a wider stride first."""
        allowed = self._allowed(sharers)
        stride = self._stride_for(allowed, kinds)
        thin = 0
        while thin < 10 and self._cost(stride, kinds, self.tensor_ns) / (1 << thin) > allowed:
            thin += 1
        self.stride, self.thin = stride, thin

    def _stride_for(self, allowed: float, kinds: int, *, nominal: bool = False) -> int:
        """The smallest stride that costs no more than `allowed` nanoseconds.

        Args:
            nominal: by the first estimate, equal on every rank, instead of what was measured.
        """
        each = TENSOR_NS if nominal else self.tensor_ns
        stride = 1
        while stride < self._most and self._cost(stride, kinds, each) > allowed:
            stride *= 2
        return stride

    def _cost(self, stride: int, kinds: int, each: float) -> float:
        return FIXED_NS + each * self.tensors * kinds / stride
