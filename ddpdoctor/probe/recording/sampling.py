"""How often, and how many tensors: as much as the budget allows, chosen alike on every rank."""

from __future__ import annotations

import time

from ...events.drift import EARLY, full
from .recorder import Recorder

SHARE = 0.4
LEAST = 0.1
"""Part of the doctor's budget that digests may take: as much as the rest of the doctor leaves, and
the least of it where the rest is over the budget already."""

FIXED_NS = 25_000
"""What a sampled step costs beside its tensors, to begin with."""

TENSOR_NS = 3_500.0
SPARSE_AFTER = 1000
"""Steps after which only every second one is looked at, and at each doubling half as many: the
record stays small however long the run."""

FIRST_STEPS = 128
FIRST_NS = 120_000
"""So many first steps are all looked at, at about this cost each: a short run has no budget to
speak of, and nobody minds some hundredths of a second."""

PER_DOUBLING = 8
"""Looks, at least, while the number of steps doubles: a drift cannot hide for long in a long run
that leaves no budget."""

CHOSEN_ANEW = 16
"""The choice is made in the first steps, and then once in so many."""

WIDEST = 128
"""Tensors of a kind per row, once the first hundred steps are over."""


class Pace:
    """The choice for one optimizer and model. Shares are powers of two and depend on the step's
    number alone, so that ranks with different choices still have steps and tensors in common."""

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
        """Whether nothing is looked at in this step for sure; cheaper than `stride_at`."""
        # Beyond the first steps, those that `full` names end in 99.
        return step & self._between != 0 and step > FIRST_STEPS and (step + 1) % 100 != 0

    def next_after(self, step: int) -> int:
        """The next step in which something may be looked at."""
        return next(n for n in range(step + 1, step + 2 + CHOSEN_ANEW) if not self.skips(n))

    def stride_at(self, step: int, kinds: int, sharers: int) -> int:
        """One tensor in how many is looked at in this step; 0 for none."""
        self._measure_steps(step)
        if self.every > 0:  # `_between` stays 0: no step is passed over
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
        """What a sampled step cost."""
        self._spent += nanoseconds
        if tensors:
            each = max(500.0, (nanoseconds - FIXED_NS) / tensors)
            self.tensor_ns += (each - self.tensor_ns) * 0.2

    def _measure_steps(self, step: int) -> None:
        """What a step has taken since the last one that was not passed over."""
        now, count = time.perf_counter_ns(), max(1, step - self._last_step)
        if self._last:
            took = (now - self._last) / count
            # Pauses (evaluation, a checkpoint) are no steps: follow upwards slowly.
            capped = min(took, 4 * self.step_ns) if self.step_ns else took
            weight = 1 - 0.9**count
            self.step_ns += (capped - self.step_ns) * (weight if self.step_ns else 1.0)
            others = (self.recorder.own_ns - self._own - self._spent) / count
            self.others_ns += (others - self.others_ns) * (weight if self.others_ns else 1.0)
        self._last, self._own, self._spent = now, self.recorder.own_ns, 0
        self._last_step = step

    def _allowed(self, sharers: int) -> float:
        budget = self.step_ns * self.percent / 100
        left = min(budget * SHARE, budget - self.others_ns)
        return max(budget * LEAST, left) / max(1, sharers)

    def _full_ns(self, kinds: int) -> float:
        return FIXED_NS + self.tensor_ns * self.tensors * kinds

    def _choose(self, kinds: int, sharers: int) -> None:
        allowed = self._allowed(sharers)
        stride = self._stride_for(allowed, kinds)
        thin = 0
        while thin < 10 and self._cost(stride, kinds, self.tensor_ns) / (1 << thin) > allowed:
            thin += 1
        self.stride, self.thin = stride, thin

    def _stride_for(self, allowed: float, kinds: int, *, nominal: bool = False) -> int:
        """The smallest that costs no more; `nominal`: the same on every rank."""
        each = TENSOR_NS if nominal else self.tensor_ns
        stride = 1
        while stride < self._most and self._cost(stride, kinds, each) > allowed:
            stride *= 2
        return stride

    def _cost(self, stride: int, kinds: int, each: float) -> float:
        return FIXED_NS + each * self.tensors * kinds / stride
