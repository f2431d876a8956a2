"""DDP501."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.loader_check import (
    LoaderCheck,
    Words,
    dataset,
    doubt,
    figures,
    related,
    since,
    steps_from,
    use,
    when,
)
from ddpdoctor.analysis.data.loader_faults import replaceable
from ddpdoctor.analysis.data.sharing_ranks import divisions
from ddpdoctor.analysis.models.wrap_options import divided
from ddpdoctor.events import Wrapped
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Rank, Run, whom

NOT_DIVIDED = "no-distributed-sampler"
YIELDS = "{sampler} yields {yielded} on every rank{order}"


class SamplerMissing(LoaderCheck):
    """Each rank iterates the whole dataset

    ## What it finds
    A `DataLoader` without a distributed sampler: the ranks that average their gradients read the
    same indices, and equal indices are the same samples.

    ## How it knows
    Each rank records the indices that its loader delivers (all of them up to 262,144 per line that
    makes the loader, then one in 2, in 4 and so on), digests of some 256 samples in epochs 0, 1, 2,
    4, 8 and so on, and what the dataset selects samples by. The indices of one epoch are compared
    between the ranks that average gradients together; the digests tell whether equal indices are
    equal samples.

    The finding is proven if they are. If samples change each time they are read (augmentation), it
    is proven if the dataset takes each sample from a tensor or a list of files, by its index, and
    holds the same entries on all ranks. It is suspected if samples could not be compared, are all
    identical, or come from nothing that the dataset holds.

    ## Why it hurts
    N ranks do the work of one: an epoch takes as long as on a single rank, and with a common seed
    all ranks compute the same batch. The learning rate for an N times larger batch then applies to
    a batch that is not larger.

    ## How to fix it
    `sampler = DistributedSampler(dataset)`, `DataLoader(dataset, sampler=sampler)` without
    `shuffle=True`, and `sampler.set_epoch(epoch)` at the start of every epoch. Where a framework
    wraps the model, let it divide the loader, too: `accelerator.prepare(loader)`,
    `fabric.setup_dataloaders(loader)`, `trainer.fit(model, loader)`.

    ## When it stays quiet
    - Only one rank iterates the loader.
    - The data is sharded manually: equal indices are other samples, or each rank takes its own
      rows of every batch for a wrapped model.
    - Every rank reads each sample several times, and feeds the model other inputs than other ranks
      (answers to one prompt that ranks share out).
    - Samples are drawn with replacement from different random states, or by a dataset whose
      `__getitem__` ignores its index.
    - The ranks average no gradients with each other, in the program or in this loop (a reference
      model that each rank trains by itself).
    - The ranks share their inputs in a tensor-parallel group.

    Only a note: all ranks evaluate the whole validation set, or read all data without a model; all
    samples are identical (toy data).
    """

    code = "DDP501"
    name = "sampler-missing"
    severity = Severity.ERROR
    words: ClassVar[Mapping[str, Words]] = {
        NOT_DIVIDED: Words(
            "training with a sampler that could be a DistributedSampler",
            YIELDS,
            "`sampler = DistributedSampler(dataset{share})`, {passed}`sampler.set_epoch(epoch)` "
            "before each epoch",
        ),
        "equal-draws": Words(
            "each rank draws its share of the data at random, from the same seed",
            YIELDS,
            "keep {sampler} and `num_samples`, which is one rank's share already, and draw other "
            "samples on each rank: `generator=torch.Generator().manual_seed(seed + rank)`",
        ),
        "undivided-selection": Words(
            "a sampler with a selection of its own yields it on every rank",
            YIELDS,
            "keep the selection of {sampler}, with the same seed on every rank, and give each rank "
            "an equal part of it: `n = len({each}) // world_size * world_size`, `return "
            "iter({each}[rank:n:world_size])` at the end of `__iter__` (of a subclass, if the "
            "sampler is torch's); nothing, if each rank is to see the same samples in another "
            "augmentation (repeated or batch augmentation)",
        ),
        "equal-evaluation": Words(
            "all ranks evaluate or read the same samples outside of training",
            YIELDS,
            "nothing, unless ranks draw random numbers there or decide by their own results; to "
            "save time, read each sample on one rank only "
            "(`sampler=range(rank, len(dataset), world_size)`) and sum totals and counts over the "
            "ranks after the loop",
        ),
    }
    rules = when(words)
    effects = (
        Effect(("identical-augmentation",), when=(When.SAME_LINE,)),
        # It is planned by the length of the only loader that trains.
        Effect(
            ("schedule-length-mismatch",),
            of=(NOT_DIVIDED,),
            rules=("loader-not-prepared",),
            when=(When.IS_ERROR, When.SAME_RANKS),
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in self.faults(run):
            yield self._report(run, fault)

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        missing = replaceable(reader, audit)
        began = (
            r.rank.wall(e.began.at) for r in fault.readers if (e := audit.epochs.get(r.rank.rank))
        )
        share = _share(divisions(run, fault.loader), run.world_size)
        by_framework = _by_framework(reader.rank) if not share else ""
        return self.of_fault(
            fault,
            {
                "yielded": _yielded(audit, missing),
                "share": share,
                "order": ", in the same order" if audit.same_order else "",
                "each": "batches" if reader.seen.batch_sampler else "indices",
                "passed": "`batch_sampler=BatchSampler(sampler, ...)`, "
                if reader.seen.batches_given
                else "`DataLoader(dataset, sampler=sampler, ...)` without `shuffle=True`, ",
            },
            note=not fault.loader.trains,
            steps=steps_from(reader, reader.epochs[0]),
            label="no distributed sampler" if missing else "every rank gets the same samples",
            related=related(reader, sampler=False),
            summary=f"{whom(fault.ranks, run.world_size)} read the same {len(audit.shared)} of "
            f"{audit.distinct} samples of {dataset(reader)} in one epoch of {use(fault.loader)}"
            f"{since(reader)}{doubt(fault)}",
            evidence={**figures(audit), "same order": audit.same_order, **fault.evidence},
            at=min(began),
            **({"fix": by_framework} if by_framework and fault.rule == NOT_DIVIDED else {}),
        )


def _by_framework(rank: Rank) -> str:
    """What has the framework divide the loader that wraps this rank's models; empty where the
    program wraps them, or that is not known."""
    ways = {divided(wrapped.by) for wrapped in rank.of(Wrapped)}
    return ways.pop() if len(ways) == 1 else ""


def _share(sets: list[frozenset[int]], world: int) -> str:
    """The arguments for a sampler that divides the data over some of the ranks only, as others
    need equal samples; empty where it divides it over all."""
    size = len(sets[0]) if sets else world
    if size == world or any(len(ranks) != size for ranks in sets):
        return ""
    step = world // size
    strided = all(sorted(ranks) == [*range(min(ranks), world, step)] for ranks in sets)
    number = f"dist.get_rank() // {step}" if strided else "dist.get_rank(group)"
    return f", num_replicas={size}, rank={number}"


def _yielded(audit: Audit, missing: bool) -> str:
    """What the sampler yields; `missing`: a `DistributedSampler` would select the same samples."""
    if not audit.never if audit.complete else missing:
        return "the whole dataset"
    known = audit.complete and audit.sampled == 1
    return (
        f"the same {len(audit.shared)} of {audit.length} samples" if known else "the same samples"
    )
