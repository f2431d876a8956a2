"""DDP705: gloo averages the gradients of GPU models."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.process.devices import shared, users
from ddpdoctor.events import GroupReady, TorchLoaded, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run


class SlowBackend(Check):
    """gloo averages the gradients of GPU models

    ## What it finds
    A model on GPUs, one per rank, whose gradients are averaged by gloo although this torch has
    NCCL.

    ## How it knows
    When the model is wrapped each rank records its device, the UUID of its GPU and the backend of
    its process group; when torch is imported, whether it has NCCL. The UUIDs show whether ranks
    share a GPU. The finding is proven.

    ## Why it hurts
    gloo copies every gradient to the host, sends it over sockets and copies it back. This takes ten
    to a hundred times as long as NCCL between the GPUs.

    ## How to fix it
    `init_process_group("nccl")`; where CPU tensors are sent too,
    `init_process_group("cpu:gloo,cuda:nccl")`. Without a backend torch takes that of the GPU only.

    ## When it stays quiet
    - models on the CPU
    - ranks that share a GPU, which NCCL does not support
    - a torch without NCCL
    - a group with both backends
    """

    code = "DDP705"
    name = "slow-backend"
    family = "performance"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if _on_gpu(run) else "no wrapped model on a GPU"

    def examine(self, run: Run) -> Iterable[Finding]:
        slow = [(r, w, g) for r, w in _on_gpu(run) if (g := _gloo(r, w)) is not None]
        if not slow or any(map(shared, users(run).values())):
            return
        rank, wrapped, group = slow[0]
        loaded = rank.first(TorchLoaded)
        if loaded is None or not loaded.nccl:
            return
        yield self.finding(
            ranks=tuple(r.rank for r, _, _ in slow),
            subjects=(wrapped.kind,),
            location=rank.location(group.site),
            label="created with gloo",
            summary=f"gloo averages the gradients of {wrapped.kind} on {wrapped.device}, although "
            "NCCL is available",
            cause="the process group uses gloo, which copies GPU tensors through the host",
            fix='`init_process_group("nccl")`',
            fix_kind=FixKind.SAFE,
            evidence={"backend": group.backend, "device": wrapped.device, "NCCL": loaded.nccl},
            at=rank.wall(wrapped.at),
        )


def _on_gpu(run: Run) -> list[tuple[Rank, Wrapped]]:
    return [
        (r, w) for r in run.ranks.values() for w in r.of(Wrapped) if w.device.startswith("cuda")
    ]


def _gloo(rank: Rank, wrapped: Wrapped) -> GroupReady | None:
    group = next((g for g in rank.of(GroupReady) if g.group == wrapped.group), None)
    return group if group is not None and group.backend == "gloo" else None
