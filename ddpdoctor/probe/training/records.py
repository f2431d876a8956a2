"""What the hooks of training pass to watchers: a forward, a backward, an optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from .backward_observation import BackwardObservation
from .tracked_model import Model, parameters


class JoinedSteps:
    """Steps of one optimizer that wait to be written as one record.

    Attributes:
        step, at: number and time of the last step.
        backwards, synced: backwards, and those that communicated, since the start of the process.
        wall_s, data_s, overlapped_s, forward_s, backward_s, optimizer_s: sums over the steps.
    """

    __slots__ = (
        "at", "backward_s", "backwards", "count", "data_s", "forward_s", "optimizer_s",
        "overlapped_s", "site", "step", "synced", "wall_s",
    )  # fmt: skip

    def __init__(self, site: int) -> None:
        self.site = site
        self.count = self.step = self.backwards = self.synced = 0
        self.at = self.wall_s = self.overlapped_s = 0.0
        self.data_s = self.forward_s = self.backward_s = self.optimizer_s = 0.0


class Optimizer:
    """What the probe knows of one optimizer.

    Attributes:
        number: in the order of the first steps.
        reference: weak, to the optimizer.
        steps: taken so far.
        due_at: the next step before which watchers want to be called on the fast path.
        began: when the last step began; `step` is that step.
        notes: what watchers know of the optimizer, by a class of their own; gone with it.
        joined: steps that are not recorded yet; `emitted_at`: when some were recorded last, and
            `backwards`, `synced` up to then.
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
    """The parameters of one model that one optimizer trains. Keeps nothing alive.

    Attributes:
        positions: in `Wrapped.parameters`, ascending. With the first optimizer of a model also its
            frozen parameters, so that these are compared too; they are replicated as well.
        held: the positions as a set.
        synchronised: the positions of parameters whose gradients DDP averages.
    """

    def __init__(self, model: Model, optimizer: int, positions: list[int]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.positions = positions
        self.held = frozenset(positions)
        expected = set(model.expected)
        self.synchronised = [p for p in positions if p in expected]

    def parameters(self, positions: list[int]) -> list[Any]:
        """The parameters at some positions, None for those that are gone."""
        return parameters(self.model, positions)


@dataclass(slots=True)
class Loading:
    """The wait for one batch of a `DataLoader`; site: the line that asks for it."""

    site: int
    error: BaseException | None = None


@dataclass(slots=True)
class Forward:
    """One forward of a wrapped model.

    Attributes:
        args, kwargs: the arguments. Watchers must not keep them.
        output: the result, None before the end. Watchers must not keep it.
        frame: the user's frame that calls; at the begin only.
        grad_enabled: gradients were enabled.
        sync: DDP is to synchronise the next backward.
        error: the exception that the forward raised, at the end.
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
        number: outermost backwards of this process before it.
        roots: the tensors it starts from. Watchers must not keep them.
        frame: the user's frame that calls it; at the begin only.
        observations: one for every model that it might belong to; empty on the fast path.
        models: at the end, the models that it belongs to: a forward waited for it, and it reached
            their parameters.
        synced: at the end, numbers of the models whose group communicated during it.
        untouched: at the end, by model number, positions (in `Wrapped.parameters`) of expected
            parameters without a gradient; only for models that were examined.
        expected_sync: by model number, whether DDP was to synchronise.
        fired: by model number, how often the gradient at each position became ready; only for
            models that were examined, also if the backward failed.
        nested: backwards inside it so far: re-entrant checkpointing runs them.
        continued: at the end, models whose forward an earlier backward left unfinished.
        unannounced: at the end, models whose parameters it reached although no forward of theirs
            was pending; each with whether its group communicated.
        logged: on the fast path, number in the ring of the collective that averages its gradients;
            -1 if it averages none, or is over.
        flag: on the fast path, DDP's `require_backward_grad_sync` when it began.
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
    logged: int = -1
    flag: bool | None = None


@dataclass(slots=True)
class Step:
    """One optimizer step, at its begin (gradients final, nothing applied) or end.

    Attributes:
        optimizer: weak reference to it.
        number: steps of this optimizer before it.
        closure: the optimizer calls a closure that runs forward and backward, so that at the begin
            the gradients are those of the step before.
        due: it is sampled, see `events.amp.told_at`.
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


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step is given a function that runs the backward."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def pieces(optimizer: Any) -> tuple[int, ...]:
    """The ranks over which an optimizer's parameters are sharded; empty if they are not DTensors of
    one mesh."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {getattr(p, "device_mesh", None) for p in parameters}
    mesh = meshes.pop() if len(meshes) == 1 else None
    return () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
