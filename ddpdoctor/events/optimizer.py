"""Optimizers and the steps they take."""

from __future__ import annotations

from .base import Event


class OptimizerSeen(Event, frozen=True, tag="optimizer"):
    """An optimizer took its first step.

    Attributes:
        closure: it was given one, which tells it the loss.
        optimizer: number of the optimizer on this rank, in order of first step.
        models: numbers of the wrappers whose parameters it holds.
        parameters: how many parameters it holds in all; `foreign` of them belong to no wrapper.
        pieces: the ranks of the one device mesh over which all of its parameters are spread
            (`DTensor`), this one among them; empty for any others.
    """

    optimizer: int
    kind: str
    site: int
    models: tuple[int, ...] = ()
    parameters: int = 0
    foreign: int = 0
    closure: bool = False
    pieces: tuple[int, ...] = ()

    def describe(self) -> str:
        return f"optimizer {self.optimizer} ({self.kind}) holds {self.parameters} parameters"


class StepDone(Event, frozen=True, tag="step"):
    """One optimizer step, the heartbeat of a run.

    Attributes:
        optimizer: which one; step: zero-based, per optimizer.
        count: steps that this record stands for, `step` being the last of them (after the first
            128, those of a quarter of a second are joined); seconds and backwards are sums over
            them.
        data_s, forward_s, backward_s, optimizer_s: time spent in each phase since the
            previous step of any optimizer; the rest of `wall_s` was spent elsewhere.
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


class Ownership(Event, frozen=True, tag="ownership"):
    """Whether the optimizers hold what is trained of a wrapped model. Recorded when it changes.

    Attributes:
        model: number of the wrapped model; below 0 for one that `fully_shard` was applied to, whose
            class is `module`.
        kind: class of the optimizer; `site` the line that made it; `held` parameters it holds, of
            which `frozen` do not require gradients.
        missing: parameters that got gradients, that no optimizer holds and nothing else changed;
            `made` is the line that made the first of them. Empty: all is well again.
        trained: parameters of the model with gradients.
        stale: shapes of parameters that the optimizer holds and that never got a gradient: of no
            module any more, or all of another one; or of all that it holds, where they got some
            and are of no module any more.
        since: steps of the optimizer before the model's first backward, -1 where unknown.
        outer: whether all trained parameters that an optimizer holds are nearer to the loss than
            those that are missing, as where only a head is trained.
        empty: parameter groups of the optimizer that hold nothing.
        begun: steps of the optimizer that stepped at the first look at which any was missing, -1
            where unknown.
        whose: number of another wrapped model, which is trained, where the optimizer holds nothing
            but its parameters and another one, made at the line `other`, holds them too; else -1.
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
