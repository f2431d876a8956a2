"""DDP305."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import unwrapped, unwrapped_rules
from ddpdoctor.analysis.replicas import manual_edits
from ddpdoctor.events import Bypassed, GroupReady, OptimizerSeen, TorchLoaded, Unwrapped
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect, When, seen, several_ranks
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run

EDITED = (manual_edits.EDIT_ON_SOME, manual_edits.UNEQUAL_EDITS, manual_edits.INEXACT_RESTORE)
"""Rules of other checks: ranks modify parameters or gradients manually."""


def _known(run: Run) -> str | None:
    if any(e.late for r in run.ranks.values() for e in r.of(TorchLoaded)):
        return "torch was already in use when the doctor started: earlier wraps are unknown"
    if run.any(Unwrapped):
        return None
    if not run.training_ranks():
        return "no optimizer step seen"
    if run.any(Bypassed):  # they hold a model whose wrapper is gone: `ddp-bypassed` tells that
        return None
    optimizers = [e for r in run.ranks.values() for e in r.of(OptimizerSeen)]
    held = not optimizers or any(e.models for e in optimizers)
    return None if held else "the optimizers step inside the backward, or on sharded parameters"


class ModelNotWrapped(Check):
    """A model is trained without synchronised gradients

    ## What it finds
    Several ranks of a process group step an optimizer on parameters that are in no wrapper. The
    gradients differ between the ranks when they are applied, so each rank trains its own model.
    Since the first step, no collective carried the gradients; or only after they were applied; or
    only copies of them, whose result is not written back. A broadcast of the parameters before the
    first step makes them equal once; it does not keep them equal.

    Also the parameters that an optimizer's own synchronisation leaves out, or that miss the hooks
    which all-reduce the others; such models beside tensor or sequence parallelism; and ranks
    outside of a group that averages gradients of the same model.

    ## How it knows
    Parameters without a wrapper are listed at an optimizer's first step. Before steps 0, 1, 2, 4, 8
    and so on they and their gradients are digested; for every collective, it is recorded which
    memory it carries, and how much. The digests of a step are compared between the ranks.

    The finding is proven if gradients differ at each of these steps and no collective carried them;
    or, with hooks, if the collectives in the backward carry exactly as many numbers as the equal
    gradients have.

    It is suspected

    - and a note, if the ranks start with different values that no rank broadcast (an ensemble),
      with no wrapped model and no sampler that shards the data
    - and a note, if every rank saves files of its own, next to another part that is synchronised
    - beside tensor parallelism, if the parameters were sent over a group before the first step and
      that group exchanges little afterwards (losses)
    - beside all_to_all in forward and backward (sequence parallelism), if all parameters start
      equal, all gradients differ, and nothing is exchanged before a step
    - beside all_to_all, for parameters that all ranks have, if another part of the model is
      wrapped, and their gradients differ and are complete before the backward's first all_to_all
    - for ranks that start equal to those that average in a group without them

    ## Why it hurts
    The run looks distributed but is N separate runs, each on its share of the data. The model that
    rank 0 saves has seen 1/N of it.

    ## How to fix it
    `model = DistributedDataParallel(model)` before the optimizer is built, and call that.

    ## When it stays quiet
    - Gradients or parameters are synchronised manually: one by one, in flat buffers, in hooks, in
      the optimizer's step, only in some steps, or as updates.
    - What FSDP shards, tensor parallelism, pipelines; training on one rank only; ranks with
      different models.
    - Hyperparameter searches: without a sampler that shards the data, the models created on one
      line differ in shape between ranks, or are trained with other options from the first step on.
    - Tables and experts that are divided among the ranks by all_to_all.
    - A line makes three or more such models beside a wrapped one (test-time adaptation).
    - A manual synchronisation leaves out some parameters of a model (see `parameter-drift`).
    - Copies of what DDP averages, flat or in another precision.

    Only a note: the ranks stay bit-identical and exchange no gradients (same data, same seed); or
    the forward of the model itself calls collectives (a head whose classes are divided among the
    ranks). No finding at all if the gradients do not come from a backward and something is
    exchanged (evolution strategies), or if objects large enough to hold the gradients are exchanged
    in half of the steps.
    """

    code = "DDP305"
    name = "model-not-wrapped"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = unwrapped_rules.RULES
    requires = (several_ranks, seen(GroupReady, otherwise="no process group was formed"), _known)
    effects = (
        Effect(NOT_AVERAGED, when=(When.IS_ERROR, When.SAME_OPTIMIZER)),
        # Parameters of other optimizers follow only if all these ranks modify them manually.
        Effect(NOT_AVERAGED, rules=EDITED, when=(When.IS_ERROR, When.SAME_RANKS)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        return unwrapped.findings(self, run)
