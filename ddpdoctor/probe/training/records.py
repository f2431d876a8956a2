"""What the hooks of training are told: a forward, a backward, an optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from .backward_observation import BackwardObservation
from .tracked_model import Model


class JoinedSteps:
    """Steps of one optimizer that wait to be told in one record.

    Attributes:
        step, at, backwards, synced: of the last of them; backwards are counted since the start.
        wall_s, data_s, forward_s, backward_s, optimizer_s: sums over them.
    """

    __slots__ = (
        "at", "backward_s", "backwards", "count", "data_s", "forward_s", "optimizer_s", "site",
        "step", "synced", "wall_s",
    )  # fmt: skip

    def __init__(self, site: int) -> None:
        self.site = site
        self.count = self.step = self.backwards = self.synced = 0
        self.at = self.wall_s = 0.0
        self.data_s = self.forward_s = self.backward_s = self.optimizer_s = 0.0


class Optimizer:
    """What the probe knows of one optimizer.

    Attributes:
        due_at: no sooner than before this step anybody wants to be told of a routine one.
        notes: what watchers know of it, by their own class; dies with the optimizer.
    """

    def __init__(self, number: int, optimizer: Any) -> None:
        self.number = number
        self.reference = weakref.ref(optimizer)
        self.steps = 0
        self.due_at = 0
        self.began = 0.0
        self.step: Step | None = None
        self.notes: dict[type, Any] = {}
        self.backwards = 0
        self.synced = 0
        self.joined: JoinedSteps | None = None
        self.emitted_at = 0.0


class OptimizerModel:
    """The parameters of one model that one optimizer steps. Keeps nothing alive.

    Attributes:
        positions: in `Wrapped.parameters`, ascending. The first optimizer of a model also answers
            for its frozen parameters: they are replicated too. `held` are the same as a set.
        synchronised: those of `positions` whose gradients DDP averages.
    """

    def __init__(self, model: Model, optimizer: int, positions: list[int]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.positions = positions
        self.held = frozenset(positions)
        expected = set(model.expected)
        self.synchronised = [p for p in positions if p in expected]

    def parameters(self, positions: list[int]) -> list[Any]:
        """The parameters at positions, None for those that are gone."""
        return [self.model.parameters[p]() for p in positions]


@dataclass(slots=True)
class Loading:
    """The wait for one batch of a `DataLoader`; site: the line that asks for it."""

    site: int
    error: BaseException | None = None


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
        observations: one at every model that it might be of.
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
    observations: list[BackwardObservation] = field(default_factory=list)
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
        due: it is looked at closely: see `emitted_at`.
        holdings: the wrapped models that the optimizer trains.
    """

    optimizer: weakref.ref[Any]
    known: Optimizer
    number: int
    site: int
    began: float
    closure: bool = False
    due: bool = False
    holdings: Sequence[OptimizerModel] = ()
