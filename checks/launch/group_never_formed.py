"""DDP106: several processes train without any process group."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import GroupReady, InitEntered, TrainsAlone
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, fold_ranks


class GroupNeverFormed(Check):
    """Each process trains alone: no process group is ever created

    ## What it finds
    Several processes were launched as ranks of one run and take optimizer steps, but none of them
    ever creates a process group, so nothing connects them.

    ## How it knows
    Before its first optimizer step each rank records whether `WORLD_SIZE` is above 1 without a
    process group, and which other communication libraries are loaded; it looks for these again when
    it exits. (A process that a script starts itself counts as a rank from its first step, if it has
    set `RANK` and `WORLD_SIZE`.)

    To detect communication by other means, a few parameters of each optimizer are compared between
    the end of a step and the begin of the next, and a few gradients between backward and step: in
    the first 32 steps, then in one of 32. The finding is proven if at least two ranks train like
    this and no rank calls `init_process_group`.

    ## Why it hurts
    The run occupies N devices and trains N unrelated models. Nothing fails, and one of the results
    (perhaps the checkpoint that was written last) is taken for the result of all.

    ## How to fix it
    Call `torch.distributed.init_process_group(backend)` before the model is created, and wrap the
    model in `DistributedDataParallel`. If the processes are meant to be independent, start them
    without torchrun, or silence this with `--ignore group-never-formed`.

    ## When it stays quiet
    - programs that do not train, and a single training process among helpers
    - programs that have loaded another communication library (MPI, Horovod, Ray, DeepSpeed, RPC),
      or that wait for keys of their own store
    - parameters that change between steps, or gradients that change before the step by more than a
      factor: other ranks may have sent these values
    """

    code = "DDP106"
    name = "group-never-formed"
    family = "launch"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if not run.training_ranks():
            return "no optimizer step seen"
        libraries = dict.fromkeys(n for r in run.ranks.values() for n in _other_libraries(r))
        loaded = ", ".join(libraries)
        return f"ranks may communicate without a process group: {loaded}" if loaded else None

    def examine(self, run: Run) -> Iterable[Finding]:
        if run.any(GroupReady) or run.any(InitEntered):
            return
        alone = {r: e for r in run.ranks.values() if (e := r.first(TrainsAlone)) is not None}
        if len(alone) < 2 or any(_other_libraries(r) for r in alone):
            return
        rank, event = next(iter(alone.items()))
        call = rank.location(event.init_site)
        yield self.finding(
            ranks=tuple(r.rank for r in alone),
            steps=Steps.of(range(rank.steps)),
            location=rank.location(event.site),
            label="steps with gradients of this rank only",
            related=(Related("never ran", call),) if call else (),
            summary=(
                f"{len(alone)} of {run.world_size} processes train independently: no process group "
                "is ever created"
            ),
            cause="WORLD_SIZE is above 1, but init_process_group is never called"
            + (
                f"; the program has a call of it, under `{event.condition}`, that never ran"
                if call
                else ""
            ),
            fix=(
                f"see why this line is never reached: `{event.condition}` does not hold (an option "
                "that was not given, a text where a boolean is asked for, no GPU), or nothing "
                "calls its function; initialise wherever WORLD_SIZE is above 1"
            )
            if call
            else (
                'call `torch.distributed.init_process_group("gloo")` (`"nccl"` on GPUs) at the '
                "start, and wrap the model: `model = DistributedDataParallel(model)`"
            ),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "world size": run.world_size,
                "ranks that train": fold_ranks(r.rank for r in alone),
                "optimizer steps": {str(r.rank): r.steps for r in alone},
            },
            at=rank.wall(event.at),
        )


def _other_libraries(rank: Rank) -> list[str]:
    """Communication libraries besides torch.distributed that a rank has loaded."""
    return [layer for event in rank.of(TrainsAlone) for layer in event.layers]
