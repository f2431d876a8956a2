"""DDP504."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.data_calls import gathered
from ddpdoctor.analysis.data.epoch_audit import Audit, audits
from ddpdoctor.analysis.data.loader_faults import faults
from ddpdoctor.analysis.data.loaders import Loader, Reader
from ddpdoctor.analysis.data.phrases import dataset, figures, no_loader, related
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Severity
from ddpdoctor.run import Location, Run, ranks_text, some


class SamplerPaddingDuplicates(Check):
    """The sampler pads, so that some samples count twice

    ## What it finds
    `DistributedSampler` makes its parts equally long by handing out some samples a second time.
    The report names their indices, the ranks that got them, and by how much a metric averaged
    over all samples can be off at most.

    ## How it knows
    When the loader is first iterated, each rank records the length of the data set and the
    `total_size` of the sampler; then the indices that are delivered (all of them up to 262,144 per
    line that makes the loader, then one in 2, in 4 and so on). Those that come more than once in an
    epoch that all ranks read to its end are told. The finding is proven; suspected where at least
    as many numbers as a rank read samples are gathered during or after the loop, by the sizes of
    the tensors and objects.

    ## Why it hurts
    In evaluation the metric depends on the number of ranks: the samples that are read twice count
    twice. In training it hardly matters.

    ## How to fix it
    Gather the predictions and drop what is beyond `len(dataset)`, or hand out the data without
    padding: `sampler=range(rank, len(dataset), world_size)` reads each sample once. Then the parts
    differ in length, so let no collective run per batch in that loop (or use `Join`).
    `drop_last=True` leaves samples out instead.

    ## When it stays quiet
    The data divides evenly, or `drop_last=True`. What a sampler of one's own repeats in training,
    or within one rank, is its choice; in evaluation the samples that several ranks read are told.
    It is a note in training, and where a result of each sample may be gathered from the ranks,
    since the surplus may be dropped there; gathered sums and counts are as far off as reduced ones.
    """

    code = "DDP504"
    name = "sampler-padding-duplicates"
    family = "data"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        faulty = {id(f.loader) for f in faults(run)}
        for loader, ranks, made in audits(run):
            readers = loader.of(ranks)
            if id(loader) not in faulty and all(_pads(r) for r in readers):
                yield from self._judge(loader, readers, made)

    def _judge(
        self, loader: Loader, readers: list[Reader], made: tuple[Audit, ...]
    ) -> Iterator[Finding]:
        own = _own_way(readers[0])
        if own and loader.trains:
            return
        again = {a.number: a.shared if own else list(a.repeated) for a in made if a.complete}
        counted = [a for a in made if again.get(a.number)]
        if not counted:
            return
        audit, reader, repeated = counted[0], readers[0], again[counted[0].number]
        padded = reader.seen.total_size - reader.seen.length
        surplus = len(repeated) * audit.sampled if own else padded
        gathered, spot = (False, None) if loader.trains else _gathering(readers)
        note = loader.trains or gathered
        owners = sorted({r for i in repeated for r in audit.readers_of(i)})
        bound = _bound(audit)
        named = some(repeated, 6) if audit.sampled == 1 else "not all on record"
        yield self.finding(
            severity=Severity.NOTE if note else Severity.WARNING,
            confidence=Confidence.SUSPECTED if gathered else Confidence.PROVEN,
            ranks=tuple(owners),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label="gives some samples to several ranks"
            if own
            else f"pads {reader.seen.length} samples to {reader.seen.total_size}",
            related=related(reader, sampler=False, gathered=spot),
            summary=f"{surplus} of {dataset(reader)} {'is' if surplus == 1 else 'are'} read "
            f"{'by several ranks' if own else 'twice'} in an epoch of "
            f"{'training' if loader.trains else 'evaluation'} (indices {named}, "
            f"on {ranks_text(owners)})" + _effect(loader, bound, gathered=gathered),
            cause=f"{reader.seen.sampler} hands them to more than one rank"
            if own
            else f"{reader.seen.length} samples do not divide by {reader.seen.replicas} ranks, "
            f"and the sampler pads to {reader.seen.total_size}",
            fix=_fix(loader, reader, own=own, gathered=gathered),
            fix_kind=FixKind.CHECK,
            evidence={
                **figures(audit),
                "for example": audit.duplicates(),
                **({} if loader.trains else _metric(bound, gathered=gathered)),
            },
            at=reader.rank.wall(audit.epochs[reader.rank.rank].began.at),
        )


def _effect(loader: Loader, bound: float, *, gathered: bool) -> str:
    if loader.trains:
        return ""
    if gathered:
        return f": a metric over them would be off by up to {bound:.2%} if they are not cut off"
    return f": an averaged metric is off by up to {bound:.2%}"


def _metric(bound: float, *, gathered: bool) -> dict[str, object]:
    return {
        "largest error of an averaged metric": f"{bound:.6f} of its range",
        "results are gathered after the loop": gathered,
    }


def _pads(reader: Reader) -> bool:
    seen = reader.seen
    pads = seen.total_size > seen.length > 0
    return seen.distributed and not seen.sampler_drop_last and (pads or _own_way(reader))


def _own_way(reader: Reader) -> bool:
    """Whether the indices are not what torch's `DistributedSampler` would hand out."""
    seen = reader.seen
    return seen.own_order or seen.total_size - seen.length >= seen.replicas


def _bound(audit: Audit) -> float:
    """The most that the mean over everything that was read can differ from the mean over the data
    set, as a share of the metric's range: each sample's weight is its count over the total."""
    total = sum(audit.total.values())
    even = 1 / audit.length * audit.sampled
    return sum(max(0.0, n / total - even) for n in audit.total.values())


def _gathering(readers: list[Reader]) -> tuple[bool, Location | None]:
    """Whether enough was gathered during or after a loop to hold something of each sample, and
    where: sums cannot be rid of the surplus any more."""
    for reader in readers:
        for epoch in reader.epochs:
            found = gathered(reader.rank, epoch.began.step)
            if found is not None and found.numbers >= epoch.samples:
                return True, reader.rank.location(found.site)
    return False, None


def _fix(loader: Loader, reader: Reader, *, own: bool, gathered: bool) -> str:
    if loader.trains:
        return "nothing, or `drop_last=True` on the sampler: in training a few repeats do no harm"
    length = reader.seen.length
    if gathered:
        once = (
            "is kept by the sample's index"
            if own
            else (
                f"is put in the order of the data set (the first of each rank, then the second of "
                f"each) and cut to {length}"
            )
        )
        return (
            f"nothing where what is gathered {once} before it is averaged; where it is not, do "
            "that, or read each sample once with `sampler=range(rank, len(dataset), world_size)`"
        )
    once = "count each sample once" if own else f"keep the first {length}"
    return (
        f"gather the predictions and {once}, or read each sample once "
        "with `sampler=range(rank, len(dataset), world_size)` and sum counts once after the loop"
    )
