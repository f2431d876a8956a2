"""DDP505."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.division import Division
from ddpdoctor.analysis.data.epoch_audit import Audit
from ddpdoctor.analysis.data.loader_check import (
    LoaderCheck,
    by_accelerate,
    figures,
    related,
    spelled,
    use,
)
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
    not fill a batch or divide by the number of ranks; or because a distributed sampler divides the
    data, and a batch sampler divides each rank's share once more (a warning). If a custom sampler
    leaves out anything else, it is its choice.

    ## How it knows
    Each rank records the indices that its loader delivers (all of them up to 262,144 per line that
    makes the loader, then one in 2, in 4 and so on). In an epoch that all ranks read to its end,
    the indices that no rank read are counted, and compared with how many sampler and loader drop
    according to their arguments. Data is divided twice if every rank delivers one n-th of what its
    sampler of n ranks yields, in batches of another sampler than torch's. The finding is proven.

    ## Why it hurts
    In evaluation, the metric is not that of the whole set. In training without shuffling, the same
    samples are never trained on.

    ## How to fix it
    In evaluation, read each sample once with `sampler=range(rank, len(dataset), world_size)`, and
    sum totals and counts once after the loop. Removing `drop_last` alone is not enough: the sampler
    would then pad, and yield some samples on two ranks. In training, remove `drop_last` if every
    sample must count; or shuffle, so that each epoch drops other samples.
    Where data is divided twice, remove one of the two samplers: `Accelerator.prepare` wants a
    loader without a `DistributedSampler`.

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
        "divided-twice": "a batch sampler divides the shares of a distributed sampler once more",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for division in sound_divisions(run):
            loader, readers, made = division.loader, division.everyone, division.audits
            if (twice := _divided_twice(division)) is not None:
                yield self._twice(division, twice)
                continue
            by_loader, by_sampler = sum(map(_dropped, readers)), _dropped_by_sampler(readers)
            most = by_loader + by_sampler
            if most:
                whole = [a for a in made if len(a.epochs) == len(readers) and a.complete]
                audit = next((a for a in whole if 0 < a.never <= most), None)
                if audit is not None:
                    yield from self._judge(run, loader, audit, whole, by_loader)

    def _twice(self, division: Division, audit: Audit) -> Finding:
        """The finding that samples are divided twice, from an epoch that shows it."""
        reader = division.readers[0]
        seen, read = reader.seen, audit.distinct * audit.sampled
        return self.of_reader(
            reader,
            rule="divided-twice",
            severity=Severity.WARNING,
            ranks=division.numbers,
            location=reader.sampler_at,
            label=f"its shares are divided once more by {seen.batch_sampler}",
            related=related(reader, sampler=False),
            summary=f"no rank reads {audit.length - read} of the {audit.length} samples of "
            f"{seen.dataset} in an epoch of {use(division.loader)}",
            cause=f"{seen.sampler} gives each rank one in {seen.replicas} samples, and "
            f"{seen.batch_sampler} delivers one in {seen.replicas} of these",
            fix="make the loader without a sampler (`shuffle=True` to shuffle): "
            "`Accelerator.prepare` divides it"
            if by_accelerate(reader)
            else f"divide once: remove {seen.sampler}, or the division in {seen.batch_sampler}",
            evidence={
                **figures(audit),
                "yielded by the sampler of each rank": seen.sampler_length,
            },
            at=reader.rank.wall(audit.at),
        )

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


def _divided_twice(division: Division) -> Audit | None:
    """An epoch in which all ranks deliver one n-th of what their samplers of n ranks yield, by the
    batches of another sampler; None where they do not do so in every whole epoch."""
    readers, batch = division.readers, division.batch
    parts = {r.seen.replicas for r in readers}
    own = all(r.seen.batch_sampler and r.seen.sampler_length > 0 for r in readers)
    whole = [a for a in division.audits if a.complete and len(a.epochs) == len(readers)]
    everyone = division.ranks.issuperset(division.loader.readers)
    if not (division.distributed and own and everyone and whole) or len(parts) > 1:
        return None
    (n,) = parts
    for audit in whole:
        for epoch in audit.epochs.values():
            yields = epoch.seen.sampler_length
            # An incomplete batch that is dropped explains less.
            if yields - epoch.samples < 2 * batch or abs(n * epoch.samples - yields) > n * batch:
                return None
        if n < 2 or audit.shared or audit.distinct > (1 + SMALL_TAIL) * _known(audit) / n:
            return None
    return whole[0]


def _known(audit: Audit) -> int:
    """How many of the dataset's indices were compared."""
    return audit.distinct + audit.never


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
    missing = set(audit.tally.unread(audit.length))
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
