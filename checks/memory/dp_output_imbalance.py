"""DDP201: DataParallel gathers all outputs on one device."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ddpdoctor.analysis.process.devices import monitor_of
from ddpdoctor.analysis.process.memory_samples import human, seen_from_outside
from ddpdoctor.analysis.process.thresholds import (
    FEWEST_DP_STEPS,
    GATHERED_SHARE,
    OUTPUT_MORE,
    OUTPUT_RATIO,
)
from ddpdoctor.events import DataParallelMade, DeviceMemory, Gathered
from ddpdoctor.report.declarations import Effect
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run


class DpOutputImbalance(Check):
    """DataParallel gathers the outputs of all devices on one

    ## What it finds
    A `torch.nn.DataParallel` whose output device needs clearly more memory than the others. The
    finding lists the tensors that each forward gathers there, the peak of torch's allocator on each
    device, and the memory of the process on each GPU by NVML.

    ## How it knows
    Each process records the size of the gathered outputs, at first and whenever it has grown by a
    quarter, and the counters of torch's allocator on all devices: after each of the first three
    steps, then at most once a second, and at the end. From the third step on, the peak of the
    output device must be 1.25 times the median of the others and 128 MB above it, and the gathered
    outputs at least a tenth of that difference. The finding is proven.

    ## Why it hurts
    The fullest device limits the batch size: it runs out of memory while the others have room.

    ## How to fix it
    Compute the loss inside `forward` and return it: one number per device is gathered instead of
    all outputs. Better, use DistributedDataParallel, which gathers nothing.

    ## When it stays quiet
    - a single device, or none
    - devices with about equal memory
    - small outputs
    """

    code = "DDP201"
    name = "dp-output-imbalance"
    family = "memory"
    severity = Severity.WARNING
    effects = (Effect(("dp-instead-of-ddp",)),)

    def unobserved(self, run: Run) -> str | None:
        made = [e for r in run.ranks.values() for e in r.of(DataParallelMade)]
        if not made:
            return "torch.nn.DataParallel was not used"
        if all(len(e.devices) < 2 for e in made):
            return "DataParallel was given fewer than two devices"
        return None if run.any(DeviceMemory) else "no step was seen at which to compare the devices"

    def examine(self, run: Run) -> Iterable[Finding]:
        for rank in run.ranks.values():
            gathered = max(rank.of(Gathered), key=lambda e: e.size_bytes, default=None)
            memory = rank.latest(DeviceMemory)
            if gathered is None or memory is None or memory.step < FEWEST_DP_STEPS:
                continue
            finding = self._judge(run, rank, gathered, memory)
            if finding is not None:
                yield finding

    def _judge(
        self, run: Run, rank: Rank, gathered: Gathered, memory: DeviceMemory
    ) -> Finding | None:
        peaks = dict(zip(memory.devices, memory.peak_bytes, strict=True))
        where = gathered.output_device
        others = [peak for device, peak in peaks.items() if device != where]
        if where not in peaks or not others:
            return None
        peak, usual = peaks[where], statistics.median(others)
        if usual <= 0 or peak < OUTPUT_RATIO * usual or peak - usual < OUTPUT_MORE:
            return None
        if gathered.size_bytes < GATHERED_SHARE * (peak - usual):
            return None
        factor = _larger_batch(rank, where, peak, usual)
        batch = (
            gathered.tensors[0].shape[0] if gathered.tensors and gathered.tensors[0].shape else 0
        )
        largest = sorted(gathered.tensors, key=lambda t: -t.size_bytes)
        room = f"the batch of {batch} could be about {int(batch * factor)}" if batch else (
            f"the batch could be {factor:.1f} times as large"
        )  # fmt: skip
        return self.finding(
            ranks=(rank.rank,),
            subjects=(f"cuda:{where}", *(t.name for t in largest[:3])),
            location=rank.location(gathered.site),
            label=f"gathers {human(gathered.size_bytes)} on cuda:{where}",
            summary=(
                f"cuda:{where} peaks at {human(peak)}, {peak / usual:.1f} times the other devices; "
                f"DataParallel gathers {human(gathered.size_bytes)} there in each forward"
            ),
            cause="the loss is computed on one device, from the outputs of all devices",
            fix=(
                "return the loss from `forward` (`loss = model(inputs, targets).mean()`): "
                f"{room} in the same memory; or use DistributedDataParallel, which gathers nothing"
            ),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "gathered": [
                    {"output": t.name, "shape": str(list(t.shape)), "size": human(t.size_bytes)}
                    for t in largest[:8]
                ],
                "devices": [{"device": f"cuda:{d}", "peak": human(p)} for d, p in peaks.items()],
                "process on each GPU (NVML)": _outside(run, rank),
                "possible batch, factor": round(factor, 2),
            },
            at=rank.wall(gathered.at),
        )


def _larger_batch(rank: Rank, where: int, peak: float, usual: float) -> float:
    """By what factor the batch could grow if the output device needed no more memory than the
    others (bytes: `peak` on the device `where`, `usual` on the others).

    Only memory that is freed between steps grows with the batch; parameters and optimizer state,
    which are allocated already when a step ends, do not.
    """
    first = next((m for m in rank.of(DeviceMemory) if m.step >= 2), None) or rank.first(
        DeviceMemory
    )
    if first is None:
        return peak / usual
    base = dict(zip(first.devices, first.allocated_bytes, strict=True))
    fixed = base.get(where, 0)
    fixed_others = statistics.median(v for d, v in base.items() if d != where)
    moving, moving_others = peak - fixed, usual - fixed_others
    return max(1.0, moving / moving_others) if moving_others > 0 else peak / usual


def _outside(run: Run, rank: Rank) -> dict[str, str]:
    """The most memory that NVML saw of a rank's process, by GPU."""
    monitor = monitor_of(run, rank)
    names = monitor.gpus if monitor else ()
    most: dict[int, int] = {}
    for sample in seen_from_outside(run, rank):
        for index, size in sample.gpu_bytes.items():
            most[index] = max(most.get(index, 0), size)
    return {
        f"GPU {i} {names[i] if i < len(names) else ''}".strip(): human(v) for i, v in most.items()
    }
