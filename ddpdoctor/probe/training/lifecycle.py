"""The moments of training that several watchers care about, and who is told.

One module brackets each moment (`models` the forwards, `autograd` the backwards, `optimizers` the
steps); watchers subscribe. A watcher that fails is counted and switched off on its own.
"""

from __future__ import annotations

from ..recording.hooks import Moment
from .records import Backward, Forward, Loading, Step
from .tracked_model import Model

PULSES_FIRST = 16
PULSE_S, PULSES_PER_PACE, SLOWEST_S = 0.04, 32, 0.64
"""Seconds between pulses after the first ones; twice as many after so many pulses."""


wrapped: Moment[Model] = Moment("wrapped")
loading_begins: Moment[Loading] = Moment("loading begins")
loading_ends: Moment[Loading] = Moment("loading ends")
loading_failed: Moment[Loading] = Moment("loading failed")
forward_begins: Moment[Forward] = Moment("forward begins")
forward_due: Moment[Forward] = Moment("forward due")
"""One with gradients begins that is looked at closely: see `looked_at`."""
trial_begins: Moment[Forward] = Moment("trial begins")
"""A forward without gradients begins, or one of a wrapper in evaluation mode."""
forward_ends: Moment[Forward] = Moment("forward ends")
trial_ends: Moment[Forward] = Moment("trial ends")
forward_failed: Moment[Forward] = Moment("forward failed")
backward_begins: Moment[Backward] = Moment("backward begins")
gradients_ready: Moment[tuple[Backward, Model]] = Moment("gradients ready")
"""Inside a backward: every gradient that DDP waits for is there (only where examined)."""
backward_ends: Moment[Backward] = Moment("backward ends")
backward_examined: Moment[Backward] = Moment("backward examined")
"""After one in which at least one model was examined whole."""
backward_astray: Moment[Backward] = Moment("backward astray")
"""After one that reached a model although no forward of its wrapper was pending."""
backward_failed: Moment[Backward] = Moment("backward failed")
gradients_missing: Moment[tuple[Model, int]] = Moment("gradients missing")
"""A backward at a line (a site) left DDP waiting for gradients of a model."""
step_begins: Moment[Step] = Moment("step begins")
step_due: Moment[Step] = Moment("step due")
"""One begins that is looked at closely: see `told_at`."""
routine_due: Moment[Step] = Moment("routine due")
"""A routine step begins that somebody waits for: see `Optimizer.due_at`."""
step_inside: Moment[Step] = Moment("step inside")
"""One begins inside a backward, maybe under DDP's lock: of these the other moments of a step do not
tell."""
step_ends: Moment[Step] = Moment("step ends")
closure_ends: Moment[Step] = Moment("closure ends")
"""Just before that, where the step had a closure: only now are the gradients its own."""
pulse: Moment[Step] = Moment("pulse")
"""After a step: the first `PULSES_FIRST`, then no more than one in some time."""


def looked_at(forward: int) -> bool:
    """Whether a model's forward of that number is looked at closely, or the next one is the first
    to be so; the same on every rank."""
    return forward < 128 or (forward + 1) % 16 < 2


def next_looked_at(forward: int) -> int:
    """The first one after that number that is."""
    return forward + 1 if looked_at(forward + 1) else (forward + 1) // 16 * 16 + 15


def until_pulse(pulses: int) -> float:
    """Seconds until the next pulse, after so many."""
    return min(PULSE_S * 2 ** (pulses // PULSES_PER_PACE), SLOWEST_S)
