"""DDP504."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.data_calls import gathered
from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_check import LoaderCheck, dataset, figures, related
from ddpdoctor.analysis.data.loader_faults import sound_divisions
from ddpdoctor.analysis.data.loaders import Loader, Reader
from ddpdoctor.report.findings import Confidence, Finding, FixKind, Severity
from ddpdoctor.run import Location, Run, counted, plural, ranks_text, some


class SamplerPaddingDuplicates(LoaderCheck):
    """The sampler pads, so that some samples count twice

    ## What it finds
    `DistributedSampler` makes its shares equally long by repeating some samples. The report names
    their indices, the ranks that read them, and the largest possible error of a metric averaged
    over all samples.

    ## How it knows
    When the loader is first iterated, each rank records the length of the dataset and the
    `total_size` of the sampler; then it records the indices delivered (all of them up to 262,144
    per line that makes the loader, then one in 2, in 4 and so on). Indices that come more than once
    in an epoch that all ranks read to its end are reported. The finding is proven; it is suspected
    if at least as many numbers as a rank read samples are gathered during or after the loop, by the
    sizes of the tensors and objects.

    ## Why it hurts
    In evaluation, repeated samples count twice, so the metric depends on the number of ranks. In
    training it hardly matters.

    ## How to fix it
    Gather the predictions and drop those beyond `len(dataset)`, or read the data without padding:
    `sampler=range(rank, len(dataset), world_size)` reads each sample once. The shares then differ
    in length, so there must be no collective per batch in that loop (or use `Join`).
    `drop_last=True` drops samples instead.

    ## When it stays quiet
    - The length divides by the number of ranks, or `drop_last=True`.
    - A custom sampler repeats samples in training, or within one rank: that is its choice.

    Only a note: training; a result per sample may be gathered from the ranks, as repeated samples
    may be dropped there. Gathered sums and counts have the same error as reduced ones.
    """

    code = "DDP504"
    name = "sampler-padding-duplicates"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "padded-evaluation": "torch's sampler pads in an evaluation",
        "padded-training": "torch's sampler pads in training",
        "padding-gathered": "torch's sampler pads in an evaluation that gathers results per sample",
        "custom-sampler": "a custom sampler yields samples on several ranks in an evaluation",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for division in sound_divisions(run):
            loader, readers, made = division.loader, division.everyone, division.audits
            if all(_pads(r) for r in readers):
                yield from self._judge(loader, readers, made)

    def _judge(
        self, loader: Loader, readers: list[Reader], made: tuple[Audit, ...]
    ) -> Iterator[Finding]:
        own = _custom(readers[0])
        if own and loader.trains:
            return
        again = {a.number: a.shared if own else list(a.repeated) for a in made if a.complete}
        repeating = [a for a in made if again.get(a.number)]
        if not repeating:
            return
        audit, reader, repeated = repeating[0], readers[0], again[repeating[0].number]
        padded = reader.seen.total_size - reader.seen.length
        surplus = len(repeated) * audit.sampled if own else padded
        gathered, spot = (False, None) if loader.trains else _gathering(readers)
        note = loader.trains or gathered
        owners = sorted({r for i in repeated for r in audit.readers_of(i)})
        bound = _bound(audit)
        unless = "unless repeats are dropped, " if gathered else ""
        error = f": {unless}an averaged metric is off by up to {bound:.2%}"
        metric = {
            "largest error of an averaged metric": f"{bound:.6f} of its range",
            "results are gathered": gathered,
        }
        named = some(repeated, 6) if audit.sampled == 1 else "not all on record"
        yield self.of_reader(
            reader,
            rule="custom-sampler"
            if own
            else "padded-training"
            if loader.trains
            else "padding-gathered"
            if gathered
            else "padded-evaluation",
            severity=Severity.NOTE if note else Severity.WARNING,
            confidence=Confidence.SUSPECTED if gathered else Confidence.PROVEN,
            ranks=tuple(owners),
            location=reader.sampler_at,
            label="yields some samples on several ranks"
            if own
            else f"pads {reader.seen.length} samples to {reader.seen.total_size}",
            related=related(reader, sampler=False, gathered=spot),
            summary=f"{counted(surplus, 'sample')} of {dataset(reader)} "
            f"{plural(surplus, 'is', 'are')} read {'by several ranks' if own else 'twice'} in an "
            f"epoch of {'training' if loader.trains else 'evaluation'} "
            f"({plural(surplus, 'index', 'indices')} {named}, on {ranks_text(owners)})"
            + ("" if loader.trains else error),
            cause=f"{reader.seen.sampler} yields them on more than one rank"
            if own
            else f"{reader.seen.length} samples do not divide by {reader.seen.replicas} ranks, "
            f"so the sampler pads to {reader.seen.total_size}",
            fix=_fix(loader, reader, own=own, gathered=gathered),
            fix_kind=FixKind.CHECK,
            evidence={
                **figures(audit),
                "for example": audit.duplicates(),
                **({} if loader.trains else metric),
            },
            at=reader.rank.wall(audit.epochs[reader.rank.rank].began.at),
        )


def _pads(reader: Reader) -> bool:
    seen = reader.seen
    pads = seen.total_size > seen.length > 0
    return seen.distributed and not seen.sampler_drop_last and (pads or _custom(reader))


def _custom(reader: Reader) -> bool:
    """Whether the indices are not those that torch's `DistributedSampler` would yield."""
    seen = reader.seen
    return seen.own_order or seen.total_size - seen.length >= seen.replicas


def _bound(audit: Audit) -> float:
    """The most that the mean over everything that was read can differ from the mean over the data
    set, as a share of the metric's range: each sample's weight is its count over the total."""
    total = sum(audit.total.values())
    even = 1 / audit.length * audit.sampled
    return sum(max(0.0, n / total - even) for n in audit.total.values())


def _gathering(readers: list[Reader]) -> tuple[bool, Location | None]:
    """Whether enough was gathered during or after a loop to hold a result of each sample, and the
    line. Repeated samples can be dropped from these, but not from sums."""
    for reader in readers:
        for epoch in reader.epochs:
            found = gathered(reader.rank, epoch.began.step)
            if found is not None and found.numbers >= epoch.samples:
                return True, reader.rank.location(found.site)
    return False, None


def _fix(loader: Loader, reader: Reader, *, own: bool, gathered: bool) -> str:
    if loader.trains:
        return "nothing: a few repeats are harmless in training; or `drop_last=True` on the sampler"
    length = reader.seen.length
    if gathered:
        once = (
            "keeps one gathered result per sample index"
            if own
            else (
                "sorts the gathered results into dataset order (the first of each rank, then the "
                f"second of each) and keeps the first {length}"
            )
        )
        return f"nothing if the program {once} before averaging; otherwise do that"
    once = "count each sample once" if own else f"keep the first {length}"
    return (
        f"gather the predictions and {once}, or read each sample once "
        "with `sampler=range(rank, len(dataset), world_size)` and sum counts once after the loop"
    )
