"""DDP504."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.data_calls import Rows, gathered, rows_used_whole
from ddpdoctor.analysis.data.division import Division
from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_check import LoaderCheck, dataset, figures, related
from ddpdoctor.analysis.data.loader_faults import sound_divisions
from ddpdoctor.analysis.data.loaders import Loader, Reader, loaders
from ddpdoctor.analysis.data.shared_evaluations import exchanged
from ddpdoctor.analysis.models.wrap_options import each_once
from ddpdoctor.report.findings import Confidence, Finding, FixKind, Severity
from ddpdoctor.run import Location, Run, counted, plural, ranks_text, some

TENSORS = 8
"""Tensors of results for each sample that one line may gather: predictions, labels, losses."""


class SamplerPaddingDuplicates(LoaderCheck):
    """The sampler pads, so that some samples count twice

    ## What it finds
    `DistributedSampler` makes its shares equally long by repeating some samples, and so do the
    batch samplers of frameworks (Accelerate). The report names their indices, the ranks that read
    them, and the largest possible error of a metric averaged over all samples.

    ## How it knows
    When the loader is first iterated, each rank records the length of the dataset and the
    `total_size` of the sampler; then it records the indices delivered (all of them up to 262,144
    per line that makes the loader, then one in 2, in 4 and so on). Indices that come more than once
    in an epoch that all ranks read to its end are reported. The finding is proven; it is suspected
    if at least as many numbers as a rank read samples are gathered during or after the loop, by the
    sizes of the tensors and objects.

    Where all ranks gather a row for each sample that they read, the repeated ones too, the code
    that can run after that line is searched for whatever selects among rows (`rows[:length]`, a
    mask, a dictionary by index). If there is nothing, the repeated rows are scored.

    ## Why it hurts
    In evaluation, repeated samples count twice, so the metric depends on the number of ranks. In
    training it hardly matters.

    ## How to fix it
    Gather the predictions and drop those beyond `len(dataset)`, or read the data without padding:
    `sampler=range(rank, len(dataset), world_size)` reads each sample once. The shares then differ
    in length, so there must be no collective per batch in that loop (or use `Join`).
    `drop_last=True` drops samples instead. With Accelerate, gather by
    `accelerator.gather_for_metrics(...)`, which drops the repeated rows.

    ## When it stays quiet
    - The length divides by the number of ranks, or `drop_last=True`.
    - A custom sampler repeats samples in training, or within one rank: that is its choice.
    - A framework's batch sampler repeats samples, and their rows are not known to be scored.

    Only a note: training; a result per sample may be gathered from the ranks, as repeated samples
    may be dropped there, or no values are exchanged by collectives, so that files may be put
    together. Gathered sums and counts have the same error as reduced ones.
    """

    code = "DDP504"
    name = "sampler-padding-duplicates"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        "padded-evaluation": "torch's sampler pads in an evaluation",
        "padded-training": "torch's sampler pads in training",
        "padding-gathered": "torch's sampler pads in an evaluation that gathers results per sample",
        "padding-apart": "torch's sampler pads in an evaluation, and no collective reduces results",
        "padding-scored": "results of all samples are gathered, the repeated ones too, and nothing "
        "selects among them",
        "custom-sampler": "a custom sampler yields samples on several ranks in an evaluation",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for division in sound_divisions(run):
            loader, readers, made = division.loader, division.everyone, division.audits
            if (scored := _scored(division)) is not None:
                yield self._of_scored(division, *scored)
            elif all(_pads(r) for r in readers):
                yield from self._judge(loader, readers, made)

    def _of_scored(self, division: Division, audit: Audit, rows: Rows) -> Finding:
        reader, total = division.everyone[0], audit.delivered * audit.sampled
        length, surplus = reader.seen.length, total - reader.seen.length
        bound = _bound(audit)
        repeated = list(audit.repeated)
        named = some(repeated, 6) if audit.sampled == 1 else "not all on record"
        return self.of_reader(
            reader,
            rule="padding-scored",
            confidence=Confidence.SUSPECTED,
            ranks=division.numbers,
            location=reader.rank.location(rows.site),
            label=f"gathers {total} results for {length} samples",
            related=related(reader, sampler=False),
            summary=f"the evaluation gathers {total} results for the {counted(length, 'sample')} "
            f"of {dataset(reader)}: {counted(surplus, 'sample')} "
            f"{plural(surplus, 'counts', 'count')} twice ({plural(surplus, 'index', 'indices')} "
            f"{named}), and a metric over all is off by up to {bound:.2%}",
            cause=f"{_padder(reader)} repeats samples to give all ranks equally many, and nothing "
            "after this line drops the repeated results",
            fix=each_once(rows.by)
            or "sort the gathered results into dataset order (the first of each rank, then the "
            f"second of each) and keep the first {length}",
            evidence={
                **figures(audit),
                "rows gathered": total,
                "samples in the data set": length,
                "largest error of an averaged metric": f"{bound:.6f} of its range",
            },
            at=reader.rank.wall(audit.epochs[reader.rank.rank].began.at),
        )

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
        apart = not loader.trains and not gathered and not any(exchanged(loader))
        note = loader.trains or gathered or apart
        owners = sorted({r for i in repeated for r in audit.readers_of(i)})
        bound = _bound(audit)
        unless = "unless repeats are dropped, " if gathered or apart else ""
        error = f": {unless}a mean over all that is read is off by up to {bound:.2%} of its range"
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
            else "padding-apart"
            if apart
            else "padded-evaluation",
            severity=Severity.NOTE if note else Severity.WARNING,
            confidence=Confidence.SUSPECTED if gathered or apart else Confidence.PROVEN,
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
            fix=_fix(loader, reader, own=own, gathered=gathered or apart),
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


def _padder(reader: Reader) -> str:
    return reader.seen.batch_sampler or reader.seen.sampler


def _scored(division: Division) -> tuple[Audit, Rows] | None:
    """The first epoch of an evaluation in which all ranks gathered a row for each sample that they
    read, some samples were repeated for equal shares, and nothing selects among the rows; with what
    was gathered."""
    numbers, readers = set(division.numbers), division.everyone
    if division.loader.trains or len(readers) < 2:
        return None
    for audit in division.audits:
        samples = {epoch.samples for epoch in audit.epochs.values()}
        total = audit.delivered * audit.sampled
        surplus = total - audit.length
        whole = audit.complete and not audit.never and set(audit.epochs) == numbers
        if not whole or len(samples) > 1 or not 0 < surplus <= total // 4:
            continue
        found = [_rows_of_samples(division, audit, reader) for reader in readers]
        if all(rows is not None for rows in found) and found[0] is not None:
            return audit, found[0]
    return None


def _rows_of_samples(division: Division, audit: Audit, reader: Reader) -> Rows | None:
    """What a rank gathered of its samples in one epoch: as many rows as samples, or a multiple
    (predictions and labels), by calls of each batch or by few calls afterwards."""
    epoch, rank = audit.epochs[reader.rank.rank], reader.rank
    step = epoch.began.step
    others = (
        e
        for loader in loaders(division.run)
        if not loader.trains
        for r in loader.readers.values()
        if r.rank is rank
        for e in r.epochs
        if e.began.step == step and e is not epoch
    )
    if any(others) or epoch.samples < 1:
        return None
    for rows in rows_used_whole(rank, epoch.began):
        tensors, rest = divmod(rows.rows, epoch.samples)
        if (
            rest == 0
            and 0 < tensors <= TENSORS
            and rows.calls in (tensors, tensors * epoch.batches)
        ):
            return rows
    return None


def _custom(reader: Reader) -> bool:
    """Whether the indices are not those that torch's `DistributedSampler` would yield."""
    seen = reader.seen
    return seen.own_order or seen.total_size - seen.length >= seen.replicas


def _bound(audit: Audit) -> float:
    """The most that the mean over everything that was read can differ from the mean over the data
    set, as a share of the metric's range: each sample's weight is its count over the total."""
    total = audit.delivered
    even = 1 / audit.length * audit.sampled
    return sum(max(0.0, n / total - even) * many for n, many in audit.tally.times.items())


def _gathering(readers: list[Reader]) -> tuple[bool, Location | None]:
    """Whether enough was gathered during or after a loop to hold a result of each sample, and the
    line. Repeated samples can be dropped from these, but not from sums."""
    for reader in readers:
        for epoch in reader.epochs:
            found = gathered(reader.rank, epoch.began)
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
        return (
            f"nothing if the program {once} before averaging, or drops repeats by their index; "
            "otherwise do that"
        )
    once = "count each sample once" if own else f"keep the first {length}"
    return (
        f"gather the predictions and {once}, or, for a mean over samples, read each sample once "
        "with `sampler=range(rank, len(dataset), world_size)` and sum counts once after the loop "
        "(one that is no such mean, as AUC or F1, needs the predictions of all ranks)"
    )
