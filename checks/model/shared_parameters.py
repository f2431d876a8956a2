"""DDP313."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import Unwrapped, UnwrappedState, Wrapped
from ddpdoctor.report.declarations import Effect, seen, several_ranks
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, ranks_text


class SharedParameters(Check):
    """Several ranks train the same memory: every step is applied once by each of them

    ## What it finds
    A model in DDP, or one whose gradients the program averages itself, whose CPU parameters are in
    memory that other ranks of the node train as well.

    ## How it knows
    `torch.multiprocessing` moves CPU tensors that are passed to another process into shared memory:
    a model that is an argument of `mp.spawn` is one model for all ranks. Where parameters are in
    shared memory, each rank records which mapping holds them (`/proc/self/maps`) when it wraps the
    model, or when its optimizer steps first. The finding is proven: the mappings are the same.

    ## Why it hurts
    Each rank averages the gradients and applies them, all to the same memory: with N ranks every
    step is N times as large, and ranks read parameters while others write them.

    ## How to fix it
    Build the model inside the function that `mp.spawn` starts, or copy it there:
    `model = copy.deepcopy(model)`. On a GPU, `model.to(device)` makes a copy.

    ## When it stays quiet
    - Ranks that train one shared model on purpose without averaging gradients (Hogwild).
    - Shared parameters that one rank trains and the others only read.
    """

    code = "DDP313"
    name = "shared-parameters"
    family = "model"
    severity = Severity.ERROR
    requires = (several_ranks, seen(Wrapped, Unwrapped, otherwise=models.NO_DDP))
    effects = (
        Effect(
            (
                "gradient-drift",
                "parameter-drift",
                "buffer-drift",
                "optimizer-state-drift",
                "unsynced-step",
            )
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        holders: dict[tuple[str, str], list[tuple[Rank, Wrapped | Unwrapped]]] = {}
        for rank in run.ranks.values():
            for event in _trained(rank):
                holders.setdefault((rank.node, event.memory), []).append((rank, event))
        for (node, memory), found in holders.items():
            ranks = tuple(dict.fromkeys(rank.rank for rank, _ in found))
            if len(ranks) < 2:
                continue
            rank, event = found[0]
            kind = event.kind or "model"
            yield self.finding(
                ranks=ranks,
                subjects=(kind,),
                location=rank.location(event.site),
                label=event.here if isinstance(event, Wrapped) else "made here",
                summary=f"{ranks_text(ranks)} train one {kind} in the same memory: each step is "
                f"applied {len(ranks)} times",
                cause="its CPU parameters were passed to the processes of the ranks, and "
                "torch.multiprocessing shares their memory instead of copying it",
                fix="copy the model on each rank before it is wrapped and before its optimizer is "
                "made, `model = copy.deepcopy(model)`, or build it in the function that each rank "
                "runs",
                fix_kind=FixKind.CHECK,
                evidence={"node": node, "mapping": memory},
                at=rank.wall(event.at),
            )


def _trained(rank: Rank) -> Iterator[Wrapped | Unwrapped]:
    """The models of a rank that are in shared memory and trained with averaged gradients."""
    if not rank.steps:
        return
    yield from (e for e in rank.of(Wrapped) if e.memory)
    averaged = {s.optimizer for s in rank.of(UnwrappedState) if s.exchanged == "gradients"}
    yield from (e for e in rank.of(Unwrapped) if e.memory and e.optimizer in averaged)
