"""Optimizers and the steps they take."""

from __future__ import annotations

from .base import Event, Part


class ParameterWrite(Part, frozen=True):
    """A statement of an optimizer that may write to parameters in place (part of `OptimizerSeen`).

    Attributes:
        target: what it writes to, as written without `.data`: `p`, `attn.q_proj.weight`.
    """

    site: int
    target: str


class OptimizerSeen(Event, frozen=True, tag="optimizer"):
    """An optimizer took its first step.

    Attributes:
        closure: a closure that computes the loss was passed to `step`.
        optimizer: number of the optimizer on this rank, in order of first step.
        models: numbers of the wrappers that synchronise parameters it holds.
        parameters: number of parameters it holds; `foreign` of them belong to no wrapper, or are
            ignored by it.
        pieces: the ranks of the device mesh over which all of its parameters are sharded
            (`DTensor`), this one included; empty for other parameters.
        step_site: the definition of its `step`, where that is the program's own; else -1.
        writes: the statements of this `step`, and of functions that it calls, that may write to
            parameters.
    """

    optimizer: int
    kind: str
    site: int
    models: tuple[int, ...] = ()
    parameters: int = 0
    foreign: int = 0
    closure: bool = False
    pieces: tuple[int, ...] = ()
    step_site: int = -1
    writes: tuple[ParameterWrite, ...] = ()

    def describe(self) -> str:
        return f"optimizer {self.optimizer} ({self.kind}) holds {self.parameters} parameters"


class StepDone(Event, frozen=True, tag="step"):
    """One optimizer step, the heartbeat of a run.

    Attributes:
        optimizer: its number; `step` is zero-based, per optimizer.
        count: number of steps in this record, of which `step` is the last (after the first 128,
            the steps of a quarter of a second are joined); seconds and backwards are their sums.
        data_s, forward_s, backward_s, optimizer_s: time spent in each phase since the
            previous step of any optimizer; the rest of `wall_s` was spent elsewhere.
        overlapped_s: what of `data_s` passed while the device still worked.
        backwards: outermost backward calls since the previous step of this optimizer.
        synced: how many of these communicated.
    """

    optimizer: int
    step: int
    site: int
    wall_s: float
    count: int = 1
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    backwards: int = 0
    synced: int = 0
    overlapped_s: float = 0.0


class Ownership(Event, frozen=True, tag="ownership"):
    """Trained parameters of a model that no optimizer holds, and an optimizer that may hold others
    instead. Recorded when this changes.

    Attributes:
        model: number of the wrapped model; negative for a `fully_shard` module, whose class is
            `module`.
        kind: class of the optimizer; `site` the line that made it; `held` the number of its
            parameters, of which `frozen` do not require gradients.
        missing: parameters with gradients that no optimizer holds and nothing else changes; `made`
            is the line that made the first of them. Empty if there are none any more.
        trained: number of parameters of the model with gradients.
        stale: shapes of parameters in the optimizer that never got a gradient and belong to no
            module any more or all to another module; or of all its parameters, if none belongs to a
            module any more.
        since: steps of the optimizer before the model's first backward, -1 if unknown.
        outer: the missing parameters are farther from the loss than all others, as when only a head
            is trained.
        empty: number of empty parameter groups of the optimizer.
        begun: steps of the stepping optimizer when the first parameter was missing, -1 if unknown.
        whose: number of another trained model, if the optimizer holds only its parameters and a
            second optimizer, made at the line `other`, holds them too; else -1.
    """

    model: int
    kind: str
    step: int
    module: str = ""
    missing: tuple[str, ...] = ()
    trained: int = 0
    held: int = 0
    stale: tuple[str, ...] = ()
    site: int = -1
    made: int = -1
    since: int = -1
    frozen: int = 0
    outer: bool = False
    empty: int = 0
    begun: int = -1
    whose: int = -1
    other: int = -1

    def describe(self) -> str:
        if not self.missing and not self.stale:
            return ""
        return (
            f"model {self.model}: {len(self.missing)} trained parameters in no optimizer, "
            f"{len(self.stale)} in one that are not trained"
        )
