"""DDP505."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_check import LoaderCheck, figures, related, spelled, use
from ddpdoctor.analysis.data.loader_faults import sound_divisions
from ddpdoctor.analysis.data.loaders import Loader, Reader, in_order, loaders
from ddpdoctor.analysis.data.parts import selected
from ddpdoctor.analysis.data.thresholds import SMALL_TAIL
from ddpdoctor.events import LoaderSeen
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Run, plural, some


class SamplerDropsTail(LoaderCheck):
    """`drop_last` leaves samples unread

    ## What it finds
    Samples that no rank reads in a whole epoch, because the sampler or the loader drops what does
    not fill a batch or divide by the number of ranks. If a custom sampler leaves out more than
    that, it is its choice.

    ## How it knows
    Each rank records the indices that its loader delivers (all of them up to 262,144 per line that
    makes the loader, then one in 2, in 4 and so on). In an epoch that all ranks read to its end,
    the indices that no rank read are counted, and compared with how many sampler and loader drop
    according to their arguments. The finding is proven.

    ## Why it hurts
    In evaluation, the metric is not that of the whole set. In training without shuffling, the same
    samples are never trained on.

    ## How to fix it
    In evaluation, read each sample once with `sampler=range(rank, len(dataset), world_size)`, and
    sum totals and counts once after the loop. Removing `drop_last` alone is not enough: the sampler
    would then pad, and yield some samples on two ranks. In training, remove `drop_last` if every
    sample must count; or shuffle, so that each epoch drops other samples.

    ## When it stays quiet
    - Shuffled training drops less than a tenth of the data per epoch, or other samples in each
      epoch.
    - Another loader reads the tail.
    - The epoch is left early.
    """

    code = "DDP505"
    name = "sampler-drops-tail"
    severity = Severity.NOTE
    rules: ClassVar[Mapping[str, str]] = {
        "sampler-drop-last": "the sampler drops what does not divide by the number of ranks",
        "loader-drop-last": "the loader (or its BatchSampler) drops the last, incomplete batch",
        "both-drop-last": "sampler and loader each drop samples",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for division in sound_divisions(run):
            loader, readers, made = division.loader, division.everyone, division.audits
            by_loader, by_sampler = sum(map(_dropped, readers)), _dropped_by_sampler(readers)
            most = by_loader + by_sampler
            if most:
                whole = [a for a in made if len(a.epochs) == len(readers) and a.complete]
                audit = next((a for a in whole if 0 < a.never <= most), None)
                if audit is not None:
                    yield from self._judge(run, loader, audit, whole, by_loader)

    def _judge(
        self, run: Run, loader: Loader, audit: Audit, whole: list[Audit], by_loader: int
    ) -> Iterator[Finding]:
        reader = loader.readers[min(audit.epochs)]
        share = audit.never * audit.sampled / audit.length
        if loader.trains and _shuffled(audit) and (share < SMALL_TAIL or _reshuffled(whole)):
            return
        if _read_elsewhere(run, loader, audit):
            return
        missing, count = audit.unseen(), audit.never * audit.sampled
        by = "its BatchSampler" if reader.seen.batches_given else "the loader"
        by_sampler = max(0, count - by_loader) if reader.seen.sampler_drop_last else 0
        mostly_sampler = by_sampler >= by_loader
        rule = "sampler-drop-last" if mostly_sampler else "loader-drop-last"
        cause = f"{'the sampler' if mostly_sampler else by} has drop_last=True"
        if by_sampler and by_loader:
            rule = "both-drop-last"
            cause = (
                f"both have drop_last=True: {by} drops {by_loader} in incomplete batches, the "
                f"sampler {by_sampler} that do not divide by the number of ranks"
            )
        yield self.of_reader(
            reader,
            rule=rule,
            ranks=tuple(audit.epochs),
            location=reader.sampler_at if mostly_sampler else reader.made_at,
            label="drops the last samples",
            related=related(reader, sampler=bool(by_sampler) and not mostly_sampler),
            summary=f"no rank reads {count} of the {audit.length} samples of {reader.seen.dataset} "
            f"in an epoch of {use(loader)}"
            + (f" ({plural(count, 'index', 'indices')} {some(missing, 6)})" if missing else ""),
            cause=cause,
            fix=_fix_training(audit) if loader.trains else _fix_evaluation(reader, by_loader),
            evidence={**figures(audit), "never read, for example": spelled(missing)},
            at=reader.rank.wall(audit.epochs[min(audit.epochs)].began.at),
        )


def _fix_training(audit: Audit) -> str:
    shuffle = "" if _shuffled(audit) else ", or shuffle"
    return f"remove `drop_last` if every sample must count{shuffle}"


def _fix_evaluation(reader: Reader, by_loader: int) -> str:
    """Without `drop_last` a distributed sampler pads, so that is no fix unless the length divides
    by the number of ranks."""
    seen = reader.seen
    sums = "sum totals and counts over the ranks once after the loop"
    if not seen.distributed or not (seen.sampler_drop_last or seen.length % seen.replicas):
        return f"remove `drop_last`, and {sums}"
    without = ", without `drop_last` on the loader" if by_loader else ""
    once = "`sampler=range(rank, len(dataset), world_size)`"
    return f"read each sample once with {once}{without}, and {sums}"


def _dropped(reader: Reader) -> int:
    """How many of a rank's samples the loader drops in an incomplete batch."""
    seen = reader.seen
    given = seen.sampler_length
    if given < 0 and not seen.own_order:
        given = seen.total_size // seen.replicas if seen.distributed else seen.length
    return given % seen.batch_size if seen.drop_last and seen.batch_size and given > 0 else 0


def _dropped_by_sampler(readers: list[Reader]) -> int:
    """How many samples at most the sampler drops because they do not divide by the ranks."""
    seen = readers[0].seen
    if not seen.sampler_drop_last:
        return 0
    known = seen.total_size > 0 and not seen.own_order
    return max(0, seen.length - seen.total_size if known else seen.replicas - 1)


def _shuffled(audit: Audit) -> bool:
    ended = audit.epochs[min(audit.epochs)].ended
    return ended is not None and not in_order(ended)


def _reshuffled(whole: list[Audit]) -> bool:
    """Whether each epoch has another order, and so drops other samples."""
    orders = {e.ended.order for a in whole if (e := a.epochs[min(a.epochs)]).ended is not None}
    return len(orders) == len(whole) > 1


def _read_elsewhere(run: Run, loader: Loader, audit: Audit) -> bool:
    """Whether other loaders of the same use read the samples that this one drops."""
    if audit.sampled > 1:
        return False
    missing = {i for i in range(audit.length) if i not in audit.total}
    for other in loaders(run):
        if other is not loader and other.trains == loader.trains:
            for rank, reader in other.readers.items():
                if rank in audit.epochs:
                    missing -= _read_through(audit.epochs[rank].seen, reader)
    return not missing


def _read_through(of: LoaderSeen, reader: Reader) -> set[int]:
    """Indices of one loader's dataset (`of`) that another loader of the rank read, through the same
    object or a `Subset` of it."""
    found: set[int] = set()
    wanted = of.layers[0].data if of.layers else -1
    for epoch in reader.epochs:
        read = epoch.indices
        for layer in epoch.seen.layers:
            if layer.data == wanted >= 0:
                found.update(read)
                break
            chosen = selected(layer)
            read = [chosen[i] for i in read if 0 <= i < len(chosen)]
    return found
