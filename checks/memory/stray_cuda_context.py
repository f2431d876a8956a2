"""DDP204: ranks hold memory on a GPU that belongs to another rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.devices import monitor_of, no_gpu, plain, used
from ddpdoctor.analysis.process.memory_samples import human, seen_from_outside
from ddpdoctor.analysis.process.thresholds import FEWEST_GPU_SAMPLES
from ddpdoctor.events import DeviceTouched, DeviceUsed
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Location, Rank, Run, ranks_do


class StrayCudaContext(Check):
    """Ranks hold memory on a GPU of another rank

    ## What it finds
    Processes with a CUDA context on a GPU on which their rank does not train and which it did not
    select by `set_device`, and the call after which the context was first seen.

    ## How it knows
    The node's monitor asks NVML, once a second or less often, which processes use which GPU, the
    ranks' workers included. Each rank records the UUID of the GPUs that hold its parameters or that
    it passed to `set_device`. A process is reported if at least two samples show it on another GPU.
    To name the call, the rank itself looks for its contexts after each `torch.load`, when the model
    is wrapped, and before its first four steps. The finding is proven.

    ## Why it hurts
    Each context takes a few hundred megabytes of another rank's GPU, mostly of the first. With
    eight ranks these are gigabytes, and rank 0 runs out of memory with a batch that fits elsewhere.

    ## How to fix it
    `torch.load(path, map_location="cpu")` (the checkpoint was saved from `cuda:0`), and
    `torch.cuda.set_device(local_rank)` before any other use of CUDA.

    ## When it stays quiet
    - devices that hold the rank's parameters or that it passed to `set_device`
    - containers whose processes NVML does not list
    """

    code = "DDP204"
    name = "stray-cuda-context"
    family = "memory"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "torch-load": "the context was first seen after torch.load",
        "first-use": "the context was first seen before the first forward or step",
        "call-unknown": "which call created the context is not known",
    }

    def unobserved(self, run: Run) -> str | None:
        reason = no_gpu(run)
        if reason:
            return reason
        if any(s.gpu_bytes for r in run.ranks.values() for s in seen_from_outside(run, r)):
            return None
        return "NVML lists none of the ranks' processes (another container, or no permission)"

    def examine(self, run: Run) -> Iterable[Finding]:
        strays = [s for r in run.ranks.values() for s in _strays(run, r)]
        by_device: dict[tuple[str, str], list[tuple[Rank, str, int, int]]] = {}
        for stray in strays:
            by_device.setdefault((stray[0].node, stray[1]), []).append(stray)
        for (node, device), guests in by_device.items():
            yield self._report(node, device, guests)

    def _report(self, node: str, device: str, guests: list[tuple[Rank, str, int, int]]) -> Finding:
        ranks = tuple(sorted(r.rank for r, *_ in guests))
        total = sum(size for *_, size in guests)
        rank, touched = next(
            ((r, t) for r, uuid, *_ in guests if (t := _touched(r, uuid))), (guests[0][0], None)
        )
        index = guests[0][2]
        spot: Location | None = rank.location(touched.site) if touched else None
        by_load = touched is not None and touched.by == "torch.load"
        how = f"after {touched.by}" if touched and by_load else touched.by if touched else ""
        rule = "torch-load" if by_load else "first-use" if how else "call-unknown"
        owner = "this rank's" if len(ranks) == 1 else "these ranks'"
        return self.finding(
            rule=rule,
            ranks=ranks,
            subjects=(f"GPU {index}",),
            location=spot,
            label=f"leaves a context on GPU {index}",
            summary=(
                f"{ranks_do(ranks, 'hold')} {human(total)} on GPU {index} of {node}, which "
                f"{'it does' if len(ranks) == 1 else 'they do'} not train on"
            ),
            cause=(
                f"{owner} CUDA context on that GPU was first seen {how}"
                if how
                else "a call used that GPU before the rank selected its own"
            ),
            fix=(
                '`torch.load(path, map_location="cpu")`, and `torch.cuda.set_device(local_rank)` '
                "before any other use of CUDA"
            ),
            fix_kind=FixKind.SAFE,
            evidence={
                "ranks": [{"rank": r.rank, "holds": human(size)} for r, _, _, size in guests],
                "device": device,
            },
            at=rank.wall(touched.at) if touched else 0.0,
        )


def _strays(run: Run, rank: Rank) -> Iterator[tuple[Rank, str, int, int]]:
    """(rank, identity, NVML's number, bytes) of every device that is not this rank's."""
    own = {plain(e.uuid) for e in used(rank) if isinstance(e, DeviceUsed)}
    monitor = monitor_of(run, rank)
    if not own or "" in own or monitor is None or not monitor.gpu_uuids:
        return
    seen: dict[int, list[int]] = {}
    for sample in seen_from_outside(run, rank):
        for index, size in sample.gpu_bytes.items():
            seen.setdefault(index, []).append(size)
    uuids = [plain(u) for u in monitor.gpu_uuids]
    if not any(uuids[i] in own for i in seen if i < len(uuids)):
        return  # NVML and torch do not speak of the same devices (MIG)
    for index, sizes in seen.items():
        if index < len(uuids) and uuids[index] not in own and len(sizes) >= FEWEST_GPU_SAMPLES:
            yield rank, uuids[index], index, max(sizes)


def _touched(rank: Rank, uuid: str) -> DeviceTouched | None:
    return next((e for e in rank.of(DeviceTouched) if plain(e.uuid) == uuid), None)
