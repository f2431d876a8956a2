"""DDP203: several ranks train on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.devices import monitor_of, no_gpu, shared, users
from ddpdoctor.report.declarations import Effect
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, counted, fold_ranks


class SharedDevice(Check):
    """Several ranks train on one GPU

    ## What it finds
    Ranks of one machine whose parameters are on the same GPU.

    ## How it knows
    When the model is wrapped and before its first four optimizer steps each rank records the UUID
    of the GPUs that hold its parameters. The UUIDs are compared between the ranks of a machine, not
    the device numbers: `cuda:0` on every rank is right where each rank sees a different GPU. The
    finding is proven.

    ## Why it hurts
    The ranks share the memory and the time of one GPU while others idle. NCCL does not support it
    ("Duplicate GPU detected").

    ## How to fix it
    Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before any other use of CUDA, and
    `model.to("cuda")` after it.

    ## When it stays quiet
    - processes that each see one device of their own
    - parts of one GPU (MIG)

    With fewer GPUs than ranks and the gloo backend it is taken for intended: a note.
    """

    code = "DDP203"
    name = "shared-device"
    family = "memory"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "fewer-gpus-than-ranks": "the node has fewer GPUs than ranks",
        "device-not-by-local-rank": "the GPU of a rank does not depend on LOCAL_RANK",
    }
    requires = (no_gpu,)
    # NCCL refuses a GPU of two ranks in DDP's constructor.
    effects = (Effect(("first-failure",), errors=(ErrorKind.SHARED_GPU,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        sharing = users(run)
        crowded = [found for found in sharing.values() if shared(found)]
        if not crowded:
            return
        rank, event = crowded[0][0]
        ranks = sorted({r.rank for found in crowded for r, _ in found})
        on_node = [r for r in run.ranks.values() if r.node == rank.node]
        monitor = monitor_of(run, rank)
        few = monitor is not None and 0 < len(monitor.gpus) < len(on_node)
        meant = few and "nccl" not in run.backend
        yield self.finding(
            rule="fewer-gpus-than-ranks" if few else "device-not-by-local-rank",
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
                f"the node has {counted(len(monitor.gpus), 'GPU')} for {len(on_node)} ranks"
                if few and monitor
                else "the device of a rank does not depend on LOCAL_RANK"
            ),
            fix=f"start one rank per GPU: `--nproc-per-node {len(monitor.gpus)}`"
            if few and monitor
            else (
                'call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before any other use '
                "of CUDA, then `model.cuda()`"
            ),
            fix_kind=FixKind.CHECK,
            evidence={
                "devices": [
                    {"device": uuid, "ranks": fold_ranks(r.rank for r, _ in found)}
                    for (_, uuid), found in sharing.items()
                ],
                "GPUs on the node": len(monitor.gpus) if monitor else None,
                "backend": run.backend,
            },
            at=rank.wall(event.at),
        )
