"""DDP203."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.process.devices import monitor_of, no_gpu, plain, trained_on
from ddpdoctor.events import DeviceUsed
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run, fold_ranks


class SharedDevice(Check):
    """Several ranks train on one GPU

    ## What it finds
    Ranks of one machine whose parameters lie on the same GPU.

    ## How it knows
    At the wrap and before its first four optimizer steps each rank records the identity (UUID) of
    the GPUs on which its parameters lie; `cuda:0` on every rank is right where each rank sees a GPU
    of its own. The identities are compared between the ranks of a machine. The finding is proven.

    ## Why it hurts
    The ranks halve one GPU's memory and time while others idle; NCCL refuses to work like that
    ("Duplicate GPU detected").

    ## How to fix it
    `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything else touches CUDA, and
    `model.to("cuda")` after it.

    ## When it stays quiet
    One visible device per process; parts of one GPU (MIG). Where there are fewer GPUs than ranks
    and gloo is used, it was meant like that and is a note.
    """

    code = "DDP203"
    name = "shared-device"
    family = "memory"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return no_gpu(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        sharing: dict[tuple[str, str], list[tuple[Rank, DeviceUsed]]] = {}
        for rank in run.ranks.values():
            for event in trained_on(rank):
                if event.uuid:
                    key = (rank.node, plain(event.uuid))
                    sharing.setdefault(key, []).append((rank, event))
        crowded = [users for users in sharing.values() if len({r.rank for r, _ in users}) > 1]
        if not crowded:
            return
        rank, event = crowded[0][0]
        ranks = sorted({r.rank for users in crowded for r, _ in users})
        on_node = [r for r in run.ranks.values() if r.node == rank.node]
        monitor = monitor_of(run, rank)
        few = monitor is not None and 0 < len(monitor.gpus) < len(on_node)
        meant = few and run.backend != "nccl"
        yield self.finding(
            severity=Severity.NOTE if meant else Severity.ERROR,
            ranks=tuple(ranks),
            subjects=tuple(dict.fromkeys(u[0][1].name for u in crowded)),
            location=rank.location(event.site),
            label="on the same GPU as another rank",
            summary=(
                f"ranks {fold_ranks(r.rank for r, _ in crowded[0])} train on one GPU "
                f"({event.name}) of {rank.node}"
            ),
            cause=(
                f"there are {len(monitor.gpus)} GPUs for {len(on_node)} ranks"
                if meant and monitor
                else "the device of a rank does not depend on LOCAL_RANK"
            ),
            fix=(
                '`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything touches '
                "CUDA, then `model.cuda()`"
            ),
            fix_kind=FixKind.CHECK,
            evidence={
                "devices": [
                    {"device": uuid, "ranks": fold_ranks(r.rank for r, _ in users)}
                    for (_, uuid), users in sharing.items()
                ],
                "GPUs on the node": len(monitor.gpus) if monitor else None,
                "backend": run.backend,
            },
            at=rank.wall(event.at),
        )
