"""DDP501."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_faults import LoaderFault, of_check
from ddpdoctor.analysis.data.phrases import (
    dataset,
    figures,
    no_loader,
    related,
    since,
    steps_from,
    use,
)
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity
from ddpdoctor.run import Location, Run, whom


class SamplerMissing(Check):
    """Each rank iterates the whole data set

    ## What it finds
    A `DataLoader` whose sampler knows nothing of ranks: the ranks that average their gradients read
    the same indices, and these stand for the same samples.

    ## How it knows
    Each rank records the indices that its loader delivers (all of them up to 262,144 per line that
    makes the loader, then one in 2, in 4 and so on), digests of some 256 samples in epochs 0, 1, 2,
    4, 8 and so on, and of what the data set selects samples by. The indices of one epoch are
    compared between the ranks that average gradients together; the digests tell whether equal
    indices stand for equal samples. The finding is proven where they do. Where samples change each
    time they are read (augmentation), it is where the data set takes each from a tensor or a list
    of files, by the index it is given, and holds the same on all ranks. It is suspected where the
    samples could not be looked at, are all alike, or are made of nothing that the data set holds.

    ## Why it hurts
    N ranks do the work of one: an epoch takes as long as without them, and its batches are, with a
    common seed, N times the same. The learning rate chosen for an N times larger batch then meets
    a batch that is not larger.

    ## How to fix it
    `sampler = DistributedSampler(dataset)`, `DataLoader(dataset, sampler=sampler)` without
    `shuffle=True`, and `sampler.set_epoch(epoch)` at the top of every epoch.

    ## When it stays quiet
    Only one rank iterates the loader; the data is sharded by hand, so that equal indices stand
    for different samples, or each rank takes its own rows of every batch for a wrapped model;
    samples are drawn with replacement from different random streams, or picked at random by a
    data set whose `__getitem__` never looks at its index; ranks that average no gradients with
    each other, in the program or in this loop (a reference model that each rank trains for
    itself, beside a wrapped one), or that share their inputs in a tensor-parallel group. Ranks
    that all evaluate the whole validation set, or read all the data without a model, and toy
    data that is all alike, are notes.
    """

    code = "DDP501"
    name = "sampler-missing"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in of_check(run, self.name):
            yield self._report(run, fault)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check == "identical-augmentation" and other.location == mine.location

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        note = bool(fault.doubt) or not fault.loader.trains
        spot = _maker(fault)
        doubt = f" ({fault.doubt})" if fault.doubt else ""
        share = len(audit.shared)
        return self.finding(
            severity=Severity.NOTE if note else Severity.ERROR,
            confidence=Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            ranks=fault.ranks,
            steps=steps_from(reader, reader.epochs[0]),
            subjects=(reader.seen.dataset,),
            location=spot,
            label="no distributed sampler" if _plain(fault) else "every rank gets the same samples",
            related=related(reader, sampler=False),
            summary=f"{whom(fault.ranks, run.world_size)} read the same {share} of "
            f"{len(audit.total)} samples of {dataset(reader)} in one epoch of {use(fault.loader)}"
            f"{since(reader)}{doubt}",
            cause=f"the loader's {reader.seen.sampler} hands out {_what(fault, audit)} on every "
            "rank" + (", in the same order" if audit.same_order else ""),
            fix=_fix(fault),
            evidence={**figures(audit), "same order": audit.same_order, **fault.evidence},
            at=min(
                r.rank.wall(audit.epochs[r.rank.rank].began.at)
                for r in fault.readers
                if r.rank.rank in audit.epochs
            ),
        )


def _maker(fault: LoaderFault) -> Location | None:
    return fault.readers[0].made_at


def _plain(fault: LoaderFault) -> bool:
    """Whether the sampler chooses nothing that a `DistributedSampler` would not."""
    sampler, audit = fault.readers[0].seen.sampler, fault.audit
    assert audit is not None
    whole = audit.complete and not audit.never and not audit.again_within
    return sampler in ("SequentialSampler", "RandomSampler") or (
        sampler == "SubsetRandomSampler" and whole
    )


def _draws_shares(fault: LoaderFault) -> bool:
    """Whether it draws at random no more on each rank than that rank's share of the data set."""
    audit = fault.audit
    assert audit is not None
    drawn = all(e.seen.replacement for e in audit.epochs.values())
    most = max(e.samples for e in audit.epochs.values())
    return drawn and audit.complete and (most - 1) * len(audit.epochs) < audit.length


def _what(fault: LoaderFault, audit: Audit) -> str:
    if not audit.never if audit.complete else _plain(fault):
        return "the whole data set"
    known = audit.complete and audit.sampled == 1
    return (
        f"the same {len(audit.shared)} of {audit.length} samples" if known else "the same samples"
    )


def _fix(fault: LoaderFault) -> str:
    if not fault.loader.trains:
        return (
            "the result is right and the time is spent on every rank; to share the work: "
            "`sampler=range(rank, len(dataset), world_size)`, which reads each sample once, and "
            "sum totals and counts over the ranks after the loop"
        )
    if not _plain(fault):
        sampler = fault.readers[0].seen.sampler
        if _draws_shares(fault):
            return (
                f"keep {sampler} and the number that it draws, which is a rank's share already, "
                "and let each rank draw other samples: "
                "`generator=torch.Generator().manual_seed(seed + rank)`"
            )
        each = "batches" if fault.readers[0].seen.batch_sampler else "indices"
        return (
            f"keep {sampler} and its choice, drawn from the same seed on every rank, and give each "
            f"rank its own part of it, as many as the others: `n = len({each}) // world_size * "
            f"world_size`, `return iter({each}[rank:n:world_size])` at the end of `__iter__`, in a "
            "class of its own where torch's is used"
        )
    if fault.readers[0].seen.batches_given:
        return (
            "`sampler = DistributedSampler(dataset)`, `batch_sampler=BatchSampler(sampler, ...)`, "
            "`sampler.set_epoch(epoch)` before each epoch"
        )
    return (
        "`sampler = DistributedSampler(dataset)`, `DataLoader(dataset, sampler=sampler, ...)` "
        "without `shuffle=True`, `sampler.set_epoch(epoch)` before each epoch"
    )
