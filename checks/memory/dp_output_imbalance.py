"""DDP201."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from ddpdoctor.analysis.process.devices import monitor_of
from ddpdoctor.analysis.process.memory_samples import MIB, human, seen_from_outside
from ddpdoctor.events import DataParallelMade, DeviceMemory, Gathered
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Rank, Run

RATIO = 1.25
MORE = 128 * MIB
FEWEST_STEPS = 3


class DpOutputImbalance(Check):
    """DataParallel fills one device with everybody's outputs

    ## What it finds
    A `torch.nn.DataParallel` whose output device needs clearly more memory than the others. The
    finding shows what is gathered on it in each forward, tensor by tensor, the peak of torch's
    allocator on each device, and what NVML saw of the process there.

    ## How it knows
    The size of what a forward gathers is recorded at first and whenever it has grown by a quarter;
    the counters of torch's allocator on all devices after each of the first three steps, then once
    a second at most, and at the end. After three steps or more, the peak of the output device must
    be 1.25 times the median of the others and 128 MB above it, and what is gathered a tenth of that
    difference. The finding is proven.

    ## Why it hurts
    The batch is limited by the fullest device: the others could take more, and the first runs out
    of memory at a size that "should fit".

    ## How to fix it
    Compute the loss inside `forward` and return that: one number per device is gathered instead of
    all outputs. Better still, DistributedDataParallel, where nothing is gathered.

    ## When it stays quiet
    One device, or none; devices that are about equally full; outputs that weigh next to nothing.
    """

    code = "DDP201"
    name = "dp-output-imbalance"
    family = "memory"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        made = [e for r in run.ranks.values() for e in r.of(DataParallelMade)]
        if not made:
            return "torch.nn.DataParallel was not used"
        if all(len(e.devices) < 2 for e in made):
            return "DataParallel was given fewer than two devices"
        return None if run.any(DeviceMemory) else "no step was seen to compare the devices at"

    def examine(self, run: Run) -> Iterable[Finding]:
        for rank in run.ranks.values():
            gathered = max(rank.of(Gathered), key=lambda e: e.size_bytes, default=None)
            memory = rank.latest(DeviceMemory)
            if gathered is None or memory is None or memory.step < FEWEST_STEPS:
                continue
            finding = self._judge(run, rank, gathered, memory)
            if finding is not None:
                yield finding

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check == "dp-instead-of-ddp"

    def _judge(
        self, run: Run, rank: Rank, gathered: Gathered, memory: DeviceMemory
    ) -> Finding | None:
        peaks = dict(zip(memory.devices, memory.peak_bytes, strict=True))
        where = gathered.output_device
        others = [peak for device, peak in peaks.items() if device != where]
        if where not in peaks or not others:
            return None
        peak, usual = peaks[where], statistics.median(others)
        # A loss per device weighs a few bytes: what fills the device is then something else.
        if usual <= 0 or peak < RATIO * usual or peak - usual < MORE:
            return None
        if gathered.size_bytes < 0.1 * (peak - usual):
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
            cause="the loss is computed on one device from the outputs of all",
            fix=(
                "return the loss from `forward` (`loss = model(inputs, targets).mean()`): "
                f"{room} in the same memory; or DistributedDataParallel, where nothing is gathered"
            ),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "gathered": [
                    {"output": t.name, "shape": str(list(t.shape)), "size": human(t.size_bytes)}
                    for t in largest[:8]
                ],
                "devices": [{"device": f"cuda:{d}", "peak": human(p)} for d, p in peaks.items()],
                "process on each GPU (NVML)": _outside(run, rank),
                "larger batch, factor": round(factor, 2),
            },
            at=rank.wall(gathered.at),
        )


def _larger_batch(rank: Rank, where: int, peak: float, usual: float) -> float:
    """How much more would fit if the output device needed no more than the others.

    What stays between the steps (parameters, optimizer state) does not grow with the batch.
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
    monitor = monitor_of(run, rank)
    names = monitor.gpus if monitor else ()
    most: dict[int, int] = {}
    for sample in seen_from_outside(run, rank):
        for index, size in sample.gpu_bytes.items():
            most[index] = max(most.get(index, 0), size)
    return {
        f"GPU {i} {names[i] if i < len(names) else ''}".strip(): human(v) for i, v in most.items()
    }
