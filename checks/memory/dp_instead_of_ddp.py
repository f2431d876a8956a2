"""DDP202: DataParallel on several devices."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import DataParallelMade
from ddpdoctor.report.declarations import seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run

MIGRATION = """\
torchrun --nproc-per-node {count} train.py, and in it:
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DistributedDataParallel(model.cuda(), device_ids=[local_rank])
    sampler = DistributedSampler(dataset)  # sampler.set_epoch(epoch) in each epoch
    loader = DataLoader(dataset, batch_size=batch_size // {count}, sampler=sampler)"""


class DpInsteadOfDdp(Check):
    """DataParallel where DistributedDataParallel is faster

    ## What it finds
    A model in `torch.nn.DataParallel` that trains on several devices.

    ## How it knows
    Each rank records the devices that are passed to `DataParallel`. The finding is proven if these
    are two or more and the process then takes optimizer steps.

    ## Why it hurts
    One Python process drives all devices. In every forward the model is copied to each device,
    inputs are scattered from the first device and outputs gathered on it, and the global
    interpreter lock serialises the work. DataParallel is limited to one machine.

    ## How to fix it
    Run one process per device with DistributedDataParallel; the note shows the lines.

    ## When it stays quiet
    - DataParallel with a single device, or without GPUs, where it does nothing
    """

    code = "DDP202"
    name = "dp-instead-of-ddp"
    family = "memory"
    severity = Severity.NOTE
    requires = (seen(DataParallelMade, otherwise="torch.nn.DataParallel was not used"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        for rank in run.ranks.values():
            made = [e for e in rank.of(DataParallelMade) if len(e.devices) > 1]
            if made and rank.steps:
                event = made[0]
                yield self.finding(
                    ranks=(rank.rank,),
                    subjects=(event.kind,),
                    location=rank.location(event.site),
                    label=f"one process drives {len(event.devices)} devices",
                    summary=(
                        f"{event.kind} trains in DataParallel on {len(event.devices)} devices"
                    ),
                    cause=(
                        "DataParallel copies the model to every device in each forward and gathers "
                        f"all outputs on cuda:{event.output_device}"
                    ),
                    fix=MIGRATION.format(count=len(event.devices)),
                    fix_kind=FixKind.TEMPLATE,
                    evidence={
                        "devices": list(event.devices),
                        "bytes copied in each forward": event.parameter_bytes,
                    },
                    at=rank.wall(event.at),
                )
                return
