"""The moments of training that several watchers care about, and who is told.

One module brackets each moment (`models` the forwards, `autograd` the backwards, `optimizers` the
steps); watchers subscribe. A watcher that fails is counted and switched off on its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .recorder import Recorder

if TYPE_CHECKING:
    from .holdings import Holding
    from .looks import Look
    from .models import Model
    from .optimizers import Optimizer
    from .routine import Expected

M = TypeVar("M")
Callback = Callable[[Recorder, M], None]

PULSES_FIRST = 16
PULSE_S, PULSES_PER_PACE, SLOWEST_S = 0.04, 32, 0.64
"""Seconds between pulses after the first ones; twice as many after so many pulses."""


class Subscription(Generic[M]):
    """A callback of a moment. One that waits for nothing now can rest: it then costs nothing.

    Attributes:
        part: how its failures are told; `lost` is what they lose.
        routine: it is told of routine steps too (see `routine`).
        given_up: it failed too often, and rests for ever.
    """

    __slots__ = ("_moment", "awake", "callback", "given_up", "lost", "part", "routine")

    def __init__(
        self, moment: Moment[M], callback: Callback[M], routine: bool, lost: str, awake: bool
    ) -> None:
        self._moment = moment
        self.part = f"{callback.__module__.rpartition('.')[2]}.{callback.__name__.strip('_')}"
        self.callback = callback
        self.routine = routine
        self.lost = lost
        self.awake = awake
        self.given_up = False

    def wake(self, awake: bool = True) -> None:
        """Have the callback called from the next such moment on."""
        if self.awake is not awake and not self.given_up:
            self.awake = awake
            self._moment.choose()

    def rest(self) -> None:
        """Have it called no more, until it is woken."""
        self.wake(False)


class Subscriptions(list[Subscription[Any]]):
    """Some that wake and rest together."""

    def wake(self, awake: bool = True) -> None:
        for one in self:
            one.wake(awake)

    def rest(self) -> None:
        self.wake(False)


class Moment(Generic[M]):
    """A kind of moment: callbacks, called in the order they subscribed.

    Attributes:
        in_routine: those to be told of it in a routine step.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._every: list[Subscription[M]] = []
        self._awake: list[Subscription[M]] = []
        self.in_routine: list[Subscription[M]] = []

    def subscribe(
        self,
        callback: Callback[M],
        *,
        routine: bool = True,
        lost: str = "",
        awake: bool = True,
    ) -> Subscription[M]:
        """Have `callback(recorder, moment)` called, in routine steps only if `routine`; `lost` says
        what its failure loses."""
        new = Subscription(self, callback, routine, lost, awake)
        self._every.append(new)
        self.choose()
        return new

    def choose(self) -> None:
        """Some of the subscriptions went to rest or woke up."""
        self._awake = [one for one in self._every if one.awake]  # a new list: `happens` may run
        self.in_routine = [one for one in self._awake if one.routine]

    def happens(self, active: Recorder, moment: M) -> None:
        for one in self._awake:
            try:
                one.callback(active, moment)
            except Exception as error:
                self._failed(active, one, error)

    def passes(self, active: Recorder, moment: M) -> None:
        """It happens in a routine step."""
        for one in self.in_routine:
            try:
                one.callback(active, moment)
            except Exception as error:
                self._failed(active, one, error)

    def _failed(self, active: Recorder, one: Subscription[M], error: Exception) -> None:
        active.trouble(one.part, error, one.lost)
        if one.part in active.off:
            one.rest()
            one.given_up = True

    def clear(self) -> None:
        self._every, self._awake, self.in_routine = [], [], []


@dataclass(slots=True)
class Loading:
    """The wait for one batch of a `DataLoader`; site: the line that asks for it."""

    site: int


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
        continued: at the end, the models whose forward an earlier one left unfinished.
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
    continued: list[Model] = field(default_factory=list)
    unannounced: list[tuple[Model, bool]] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True)
class Step:
    """One optimizer step, at its begin (gradients final, nothing applied) or end.

    Attributes:
        closure: the optimizer calls a closure that runs forward and backward: at the begin the
            gradients are those of the step before.
        due: it is looked at closely: see `told_at`.
        holdings: the wrapped models that the optimizer trains.
    """

    optimizer: weakref.ref[Any]
    known: Optimizer
    number: int
    site: int
    began: float
    closure: bool = False
    due: bool = False
    holdings: Sequence[Holding] = ()


_CARRY_VALUES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather",
    "all_gather_into_tensor", "all_gather_coalesced", "gather", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
_GATHER = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "gather")


@dataclass(slots=True)
class Call:
    """A collective or point-to-point call, about to be made.

    Attributes:
        op: as in `calls.KINDS`; group: its number, -1 where unknown.
        tensors: what goes in. Watchers must not keep them.
        reduction: torch's own reduce operation, None where there is none.
        peers: global ranks on the other side of a point-to-point call, -1 for any.
    """

    op: str
    group: int
    p2p: bool
    tensors: tuple[Any, ...]
    reduction: Any = None
    peers: tuple[int, ...] = ()

    @property
    def carries_values(self) -> bool:
        """Whether it is a collective of tensors, and no barrier."""
        return self.op in _CARRY_VALUES

    @property
    def gathers(self) -> bool:
        """Whether it leaves what a rank hands over as it is."""
        return self.op in _GATHER


@dataclass(slots=True)
class Issued:
    """An asynchronous call was made, the last one that was told of as a `Call`.

    Attributes:
        number: in the ring.
        works: torch's own, each ends a part of it.
    """

    number: int
    works: tuple[Any, ...]


wrapped: Moment[Model] = Moment("wrapped")
loading_begins: Moment[Loading] = Moment("loading begins")
loading_ends: Moment[Loading] = Moment("loading ends")
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
called: Moment[Call] = Moment("called")
issued: Moment[Issued] = Moment("issued")
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
interrupted: Moment[Expected] = Moment("interrupted")
"""A step that began as a routine one is none: what has passed of it is still to be told."""
handled: Moment[BaseException] = Moment("handled")
"""A handler of the user's logs or prints what it caught."""
leaving: Moment[None] = Moment("leaving")
"""The interpreter is about to leave; the last chance to record."""

EVERY = (
    wrapped, loading_begins, loading_ends, forward_begins, forward_due, trial_begins, forward_ends,
    trial_ends, forward_failed, backward_begins, gradients_ready, backward_ends, backward_examined,
    backward_astray, backward_failed, called, issued, step_begins, step_due, routine_due,
    step_inside, step_ends, closure_ends, pulse, interrupted, handled, leaving,
)  # fmt: skip


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


def forget() -> None:
    """Drop every subscription."""
    for moment in EVERY:
        moment.clear()
