"""The moments of training that several watchers care about, and who is told.

One module brackets each moment (`models` the forwards, `autograd` the backwards, `optimizers` the
steps); watchers subscribe. A watcher that fails is counted and switched off on its own.
"""

from __future__ import annotations

from ..recording.hooks import Hook
from .records import Backward, Forward, Loading, Step
from .tracked_model import Model

PULSES_FIRST = 16
PULSE_S, PULSES_PER_PACE, SLOWEST_S = 0.04, 32, 0.64
"""Seconds between pulses after the first ones; twice as many after so many pulses."""


wrapped: Hook[Model] = Hook("wrapped")
loading_begins: Hook[Loading] = Hook("loading begins")
loading_ends: Hook[Loading] = Hook("loading ends")
loading_failed: Hook[Loading] = Hook("loading failed")
forward_begins: Hook[Forward] = Hook("forward begins")
forward_due: Hook[Forward] = Hook("forward due")
"""One with gradients begins that is looked at closely: see `looked_at`."""
trial_begins: Hook[Forward] = Hook("trial begins")
"""A forward without gradients begins, or one of a wrapper in evaluation mode."""
forward_ends: Hook[Forward] = Hook("forward ends")
trial_ends: Hook[Forward] = Hook("trial ends")
forward_failed: Hook[Forward] = Hook("forward failed")
backward_begins: Hook[Backward] = Hook("backward begins")
gradients_ready: Hook[tuple[Backward, Model]] = Hook("gradients ready")
"""Inside a backward: every gradient that DDP waits for is there (only where examined)."""
backward_ends: Hook[Backward] = Hook("backward ends")
backward_examined: Hook[Backward] = Hook("backward examined")
"""After one in which at least one model was examined whole."""
backward_unannounced: Hook[Backward] = Hook("backward astray")
"""After one that reached a model although no forward of its wrapper was pending."""
backward_failed: Hook[Backward] = Hook("backward failed")
gradients_missing: Hook[tuple[Model, int]] = Hook("gradients missing")
"""A backward at a line (a site) left DDP waiting for gradients of a model."""
step_begins: Hook[Step] = Hook("step begins")
step_due: Hook[Step] = Hook("step due")
"""One begins that is looked at closely: see `told_at`."""
fast_step_due: Hook[Step] = Hook("routine due")
"""A routine step begins that somebody waits for: see `Optimizer.due_at`."""
step_inside: Hook[Step] = Hook("step inside")
"""One begins inside a backward, maybe under DDP's lock: of these the other moments of a step do not
tell."""
step_ends: Hook[Step] = Hook("step ends")
closure_ends: Hook[Step] = Hook("closure ends")
"""Just before that, where the step had a closure: only now are the gradients its own."""
pulse: Hook[Step] = Hook("pulse")
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
