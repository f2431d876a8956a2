"""The hooks of training: moments that watchers subscribe to.

They are fired by `wrapped_models`, `forwards`, `backwards`, `optimizers`, and the watchers of
loaders and of models without a wrapper.
"""

from __future__ import annotations

from typing import Any

from ..recording.hooks import Hook
from .limits import PULSE_S, PULSES_PER_PACE, SLOWEST_S
from .records import Backward, Forward, Loading, Step
from .tracked_model import Model

wrapped: Hook[Model] = Hook("wrapped")
loading_begins: Hook[Loading] = Hook("loading begins")
loading_ends: Hook[Loading] = Hook("loading ends")
loading_failed: Hook[Loading] = Hook("loading failed")
forward_begins: Hook[Forward] = Hook("forward begins")
forward_due: Hook[Forward] = Hook("forward due")
"""A forward with gradients begins that is sampled, see `looked_at`."""
trial_begins: Hook[Forward] = Hook("trial begins")
"""A forward without gradients begins, or one of a wrapper in evaluation mode; `trial_ends` is its
end."""
forward_ends: Hook[Forward] = Hook("forward ends")
trial_ends: Hook[Forward] = Hook("trial ends")
forward_failed: Hook[Forward] = Hook("forward failed")
backward_begins: Hook[Backward] = Hook("backward begins")
gradients_ready: Hook[tuple[Backward, Model]] = Hook("gradients ready")
"""Inside a backward that is examined: every gradient that DDP waits for is ready."""
backward_ends: Hook[Backward] = Hook("backward ends")
backward_examined: Hook[Backward] = Hook("backward examined")
"""After a backward in which all gradients of at least one model were counted."""
backward_unannounced: Hook[Backward] = Hook("backward unannounced")
"""After a backward that reached a model although no forward of its wrapper was pending."""
backward_failed: Hook[Backward] = Hook("backward failed")
gradients_missing: Hook[tuple[Model, int]] = Hook("gradients missing")
"""(model, site): a backward at that line left DDP waiting for gradients of the model."""
step_begins: Hook[Step] = Hook("step begins")
step_due: Hook[Step] = Hook("step due")
"""A step begins that is sampled, see `events.amp.told_at`."""
fast_step_due: Hook[Step] = Hook("fast step due")
"""A step begins on the fast path that a watcher waits for, see `Optimizer.due_at`."""
step_inside: Hook[Step] = Hook("step inside")
"""A step begins inside a backward, maybe under DDP's lock; the other hooks of a step do not fire
for it."""
step_ends: Hook[Step] = Hook("step ends")
unwrapped: Hook[tuple[int, list[Any]]] = Hook("unwrapped")
"""(optimizer, parameters): before its first step, those that it trains outside of any wrapper; and
again where they change."""
closure_ends: Hook[Step] = Hook("closure ends")
"""Just before `step_ends` if the step had a closure: only now are the gradients its own."""
pulse: Hook[Step] = Hook("pulse")
"""After a step: each of the first `PULSES_FIRST`, then one in some time."""


def looked_at(forward: int) -> bool:
    """Whether a model's forward of that number is sampled, or the next one is the first of those
    sampled: watchers can prepare for it. Equal on every rank."""
    return forward < 128 or (forward + 1) % 16 < 2


def next_looked_at(forward: int) -> int:
    """The number of the next forward after `forward` for which `looked_at` holds."""
    return forward + 1 if looked_at(forward + 1) else (forward + 1) // 16 * 16 + 15


def until_pulse(pulses: int) -> float:
    """Seconds until the next pulse, after so many pulses."""
    return min(PULSE_S * 2 ** (pulses // PULSES_PER_PACE), SLOWEST_S)
