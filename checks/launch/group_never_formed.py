"""DDP106."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import GroupReady, InitEntered, TrainsAlone
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, fold_ranks


class GroupNeverFormed(Check):
    """Every process trains as if it were alone

    ## What it finds
    Several processes were launched as ranks of one run and take optimizer steps, but none of them
    ever made a process group: nothing connects them.

    ## How it knows
    Before its first optimizer step each rank records whether `WORLD_SIZE` is above 1 and there is
    no process group, and which other means of communication are loaded; as it leaves, it looks for
    these again. A process that a script starts itself is a rank from that step on, where it has set
    `RANK` and `WORLD_SIZE`. Meanwhile a few parameters of each optimizer are compared after every
    step with what they are before the next one, and a few gradients after a backward with what they
    are at the step (in the first 32 steps, then in one of 32). The finding is proven where at least
    two ranks train like that and no rank ever calls `init_process_group`.

    ## Why it hurts
    The run costs N devices and trains N unrelated models, each as if it were alone. Nothing fails,
    and the result of one of them (or of whichever wrote the checkpoint last) is taken for all.

    ## How to fix it
    `torch.distributed.init_process_group(backend)` before the model is made, and the model in
    `DistributedDataParallel`. If the processes are meant to be independent, start them without
    torchrun, or silence this with `--ignore group-never-formed`.

    ## When it stays quiet
    Programs that do not train; a single training process among helpers; programs that have loaded
    another means of communication (MPI, Horovod, Ray, DeepSpeed, RPC) or wait for keys of a store
    of their own; and where something else than the optimizer changes parameters between the steps,
    or gradients before them otherwise than by a factor: that may be what other ranks have sent.
    """

    code = "DDP106"
    name = "group-never-formed"
    family = "launch"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not run.training_ranks():
            return "no optimizer step seen"
        means = {layer: None for r in run.ranks.values() for layer in _means(r)}
        return f"without a group ranks may still exchange: {', '.join(means)}" if means else None

    def examine(self, run: Run) -> Iterable[Finding]:
        if run.any(GroupReady) or run.any(InitEntered):
            return
        alone = {r: e for r in run.ranks.values() if (e := r.first(TrainsAlone)) is not None}
        if len(alone) < 2 or any(_means(r) for r in alone):
            return
        rank, event = next(iter(alone.items()))
        yield self.finding(
            ranks=tuple(r.rank for r in alone),
            steps=Steps.of(range(rank.steps)),
            location=rank.location(event.site),
            label="steps on gradients that no other rank has seen",
            summary=(
                f"{len(alone)} of {run.world_size} processes train, each as if it were alone: no "
                "process group was ever made"
            ),
            cause="WORLD_SIZE says that they belong together, init_process_group was never called",
            fix=(
                '`torch.distributed.init_process_group("gloo")` (`"nccl"` on GPUs) at the start '
                "and `model = DistributedDataParallel(model)`"
            ),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "world size": run.world_size,
                "ranks that train": fold_ranks(r.rank for r in alone),
                "optimizer steps": {str(r.rank): r.steps for r in alone},
            },
            at=rank.wall(event.at),
        )


def _means(rank: Rank) -> list[str]:
    """Other means of communication."""
    return [layer for event in rank.of(TrainsAlone) for layer in event.layers]
