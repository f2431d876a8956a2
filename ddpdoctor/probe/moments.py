"""The moments of training that several watchers care about, and who is told.

One module brackets each moment (`models` the forwards, `autograd` the backwards, `optimizers` the
steps); watchers subscribe. A watcher that fails is counted and switched off on its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .recorder import Recorder

if TYPE_CHECKING:
    from .holdings import Holding
    from .looks import Look
    from .models import Model
    from .optimizers import Optimizer

M = TypeVar("M")

PULSE_S = 0.02
PULSES_FIRST = 16


class Moment(Generic[M]):
    """A kind of moment: callbacks, called in the order they subscribed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._callbacks: list[tuple[str, Callable[[Recorder, M], None], str]] = []

    def subscribe(self, callback: Callable[[Recorder, M], None], *, lost: str = "") -> None:
        """Have `callback(recorder, moment)` called; `lost` says what its failure loses."""
        part = f"{callback.__module__.rpartition('.')[2]}.{callback.__name__.strip('_')}"
        self._callbacks.append((part, callback, lost))

    def happens(self, active: Recorder, moment: M) -> None:
        off = active.off
        for part, callback, lost in self._callbacks:
            if off and part in off:
                continue
            try:
                callback(active, moment)
            except Exception as error:
                active.trouble(part, error, lost)

    def clear(self) -> None:
        self._callbacks.clear()


@dataclass(slots=True)
class Forward:
    """One forward of a wrapped model.

    Attributes:
        args, kwargs: what the user passed; output what came back (at the end, None before).
            Watchers must not keep them.
        frame: the user's that makes the call; at the begin only.
        grad_enabled: gradients were on; sync: DDP meant to synchronise the next backward.
        error: what the forward raised, at the end.
    """

    model: Model
    wrapper: Any
    site: int
    grad_enabled: bool
    sync: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: FrameType | None = None
    output: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class Backward:
    """One outermost backward.

    Attributes:
        number: how many this process had before it.
        roots: the tensors it starts from. Watchers must not keep them.
        frame: the user's that calls it; at the begin only.
        looks: one at every model that it might be of.
        models: at the end, the models whose parameters it reached and that it was told apart
            from the pending ones by; `synced` are those whose group communicated meanwhile.
        untouched: at the end, by model number, positions (as in `Wrapped.parameters`) of expected
            parameters whose gradient it did not touch; only for models examined whole.
        expected_sync: by model number, whether DDP meant to synchronise.
        fired: by model number, how often the gradient at a position became ready; only for models
            examined whole, also where the backward failed.
        nested: backwards inside it so far: re-entrant checkpointing runs them.
        unannounced: at the end, models whose parameters it reached although no forward of theirs
            was pending, and whether their group communicated meanwhile.
    """

    number: int
    site: int
    roots: tuple[Any, ...]
    began: float
    frame: FrameType | None = None
    looks: list[Look] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    synced: set[int] = field(default_factory=set)
    expected_sync: dict[int, bool] = field(default_factory=dict)
    untouched: dict[int, tuple[int, ...]] = field(default_factory=dict)
    fired: dict[int, dict[int, int]] = field(default_factory=dict)
    nested: int = 0
    unannounced: list[tuple[Model, bool]] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True)
class Step:
    """One optimizer step, at its begin (gradients final, nothing applied) or end.

    Attributes:
        closure: the optimizer calls a closure that runs forward and backward: at the begin the
            gradients are those of the step before.
        holdings: filled in by the first watcher that asks `holdings.of`.
    """

    optimizer: weakref.ref[Any]
    known: Optimizer
    number: int
    site: int
    began: float
    closure: bool = False
    holdings: list[Holding] | None = None


@dataclass(slots=True)
class Call:
    """A collective or point-to-point call, about to be made.

    Attributes:
        op: as in `calls.KINDS`; group: its number, -1 where unknown.
        tensors: what goes in. Watchers must not keep them.
        reduction: torch's own reduce operation, None where there is none.
    """

    op: str
    group: int
    p2p: bool
    tensors: tuple[Any, ...]
    reduction: Any = None


wrapped: Moment[Model] = Moment("wrapped")
forward_begins: Moment[Forward] = Moment("forward begins")
forward_ends: Moment[Forward] = Moment("forward ends")
backward_begins: Moment[Backward] = Moment("backward begins")
gradients_ready: Moment[tuple[Backward, Model]] = Moment("gradients ready")
"""Inside a backward: every gradient that DDP waits for is there (only where examined)."""
backward_ends: Moment[Backward] = Moment("backward ends")
called: Moment[Call] = Moment("called")
step_begins: Moment[Step] = Moment("step begins")
step_ends: Moment[Step] = Moment("step ends")
pulse: Moment[Step] = Moment("pulse")
"""After a step: the first `PULSES_FIRST`, then no more than one in `PULSE_S` seconds."""
leaving: Moment[None] = Moment("leaving")
"""The interpreter is about to leave; the last chance to record."""

EVERY = (
    wrapped, forward_begins, forward_ends, backward_begins, gradients_ready, backward_ends,
    called, step_begins, step_ends, pulse, leaving,
)  # fmt: skip


def forget() -> None:
    """Drop every subscription."""
    for moment in EVERY:
        moment.clear()
