"""DDP501."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.loader_faults import of_check
from ddpdoctor.analysis.data.phrases import (
    dataset,
    figures,
    no_loader,
    related,
    since,
    steps_from,
    use,
)
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity
from ddpdoctor.run import Run, whom


class SamplerMissing(Check):
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
    `shuffle=True`, and `sampler.set_epoch(epoch)` at the start of every epoch.

    ## When it stays quiet
    - Only one rank iterates the loader.
    - The data is sharded manually: equal indices are other samples, or each rank takes its own
      rows of every batch for a wrapped model.
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
    family = "data"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "no-distributed-sampler": "training with a sampler that could be a DistributedSampler",
        "equal-draws": "each rank draws its share of the data at random, from the same seed",
        "undivided-selection": "a sampler with a selection of its own yields it on every rank",
        "equal-evaluation": "all ranks evaluate or read the same samples outside of training",
    }
    requires = (no_loader,)
    effects = (Effect(("identical-augmentation",), when=(When.SAME_LINE,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in of_check(run, self.name):
            yield self._report(run, fault)

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        note = fault.doubt is not None or not fault.loader.trains
        doubt = f" ({fault.doubt.value})" if fault.doubt else ""
        sources = {"samples are made of": ", ".join(fault.sources)} if fault.sources else {}
        rule = _rule(fault, audit)
        return self.finding(
            rule=rule,
            severity=Severity.NOTE if note else Severity.ERROR,
            confidence=Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            ranks=fault.ranks,
            steps=steps_from(reader, reader.epochs[0]),
            subjects=(reader.seen.dataset,),
            location=reader.made_at,
            label="no distributed sampler"
            if _replaceable(fault, audit)
            else "every rank gets the same samples",
            related=related(reader, sampler=False),
            summary=f"{whom(fault.ranks, run.world_size)} read the same {len(audit.shared)} of "
            f"{len(audit.total)} samples of {dataset(reader)} in one epoch of {use(fault.loader)}"
            f"{since(reader)}{doubt}",
            cause=f"{reader.seen.sampler} yields {_yielded(fault, audit)} on every rank"
            + (", in the same order" if audit.same_order else ""),
            fix=_fix(fault, rule),
            evidence={**figures(audit), "same order": audit.same_order, **sources},
            at=min(
                r.rank.wall(audit.epochs[r.rank.rank].began.at)
                for r in fault.readers
                if r.rank.rank in audit.epochs
            ),
        )


def _rule(fault: LoaderFault, audit: Audit) -> str:
    if not fault.loader.trains:
        return "equal-evaluation"
    if _replaceable(fault, audit):
        return "no-distributed-sampler"
    return "equal-draws" if _draws_shares(audit) else "undivided-selection"


def _replaceable(fault: LoaderFault, audit: Audit) -> bool:
    """Whether a `DistributedSampler` would select the same samples as the sampler does."""
    sampler = fault.readers[0].seen.sampler
    whole = audit.complete and not audit.never and not audit.again_within
    return sampler in ("SequentialSampler", "RandomSampler") or (
        sampler == "SubsetRandomSampler" and whole
    )


def _draws_shares(audit: Audit) -> bool:
    """Whether each rank draws, with replacement, no more samples than its share of the dataset."""
    drawn = all(e.seen.replacement for e in audit.epochs.values())
    most = max(e.samples for e in audit.epochs.values())
    return drawn and audit.complete and (most - 1) * len(audit.epochs) < audit.length


def _yielded(fault: LoaderFault, audit: Audit) -> str:
    if not audit.never if audit.complete else _replaceable(fault, audit):
        return "the whole dataset"
    known = audit.complete and audit.sampled == 1
    return (
        f"the same {len(audit.shared)} of {audit.length} samples" if known else "the same samples"
    )


def _fix(fault: LoaderFault, rule: str) -> str:
    seen = fault.readers[0].seen
    if rule == "equal-evaluation":
        return (
            "nothing, the result is correct; to save time, read each sample on one rank only "
            "(`sampler=range(rank, len(dataset), world_size)`) and sum totals and counts over the "
            "ranks after the loop"
        )
    if rule == "equal-draws":
        return (
            f"keep {seen.sampler} and `num_samples`, which is one rank's share already, and draw "
            "other samples on each rank: `generator=torch.Generator().manual_seed(seed + rank)`"
        )
    if rule == "undivided-selection":
        each = "batches" if seen.batch_sampler else "indices"
        return (
            f"keep the selection of {seen.sampler}, with the same seed on every rank, and give "
            f"each rank an equal part of it: `n = len({each}) // world_size * world_size`, `return "
            f"iter({each}[rank:n:world_size])` at the end of `__iter__` (of a subclass, if the "
            "sampler is torch's)"
        )
    if seen.batches_given:
        return (
            "`sampler = DistributedSampler(dataset)`, `batch_sampler=BatchSampler(sampler, ...)`, "
            "`sampler.set_epoch(epoch)` before each epoch"
        )
    return (
        "`sampler = DistributedSampler(dataset)`, `DataLoader(dataset, sampler=sampler, ...)` "
        "without `shuffle=True`, `sampler.set_epoch(epoch)` before each epoch"
    )
