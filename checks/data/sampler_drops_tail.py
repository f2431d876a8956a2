"""DDP505."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.data.epoch_audit import Audit, audits
from ddpdoctor.analysis.data.loader_faults import faults
from ddpdoctor.analysis.data.loaders import Loader, Reader, in_order, loaders
from ddpdoctor.analysis.data.parts import selected
from ddpdoctor.analysis.data.phrases import dataset, figures, no_loader, related, spelled, use
from ddpdoctor.events import LoaderSeen
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, some

SMALL_TAIL = 0.1
"""Share of the data that shuffled training may leave out of an epoch."""


class SamplerDropsTail(Check):
    """`drop_last` leaves samples unseen

    ## What it finds
    Samples that no rank read in an epoch that ran to its end, because the sampler or the loader
    drops what does not fill a batch or a round of ranks. What a sampler of one's own leaves out
    beyond that is its choice.

    ## How it knows
    Each rank records the indices that its loader delivers (all of them up to 262,144 per line that
    makes the loader, then one in 2, in 4 and so on). Of an epoch that all ranks read to its end,
    those that nobody read are counted, and compared with what sampler and loader are made to drop.
    The finding is proven.

    ## Why it hurts
    In evaluation the metric is not that of the whole set. In training without shuffling the same
    samples are never learned from.

    ## How to fix it
    In evaluation, read each sample once with `sampler=range(rank, len(dataset), world_size)`, and
    sum totals and counts once after the loop: without `drop_last` alone, the sampler would hand
    some samples to two ranks. In training, leave `drop_last` out where every sample must count; or
    shuffle, so that each epoch leaves out others.

    ## When it stays quiet
    Shuffled training that leaves out less than a tenth of the data per epoch, or other samples in
    each epoch; a tail that another loader reads; epochs that were left early; nothing dropped.
    """

    code = "DDP505"
    name = "sampler-drops-tail"
    family = "data"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        faulty = {id(f.loader) for f in faults(run)}
        for loader, ranks, made in audits(run):
            readers = loader.of(ranks)
            by_loader, by_sampler = sum(map(_dropped, readers)), _of_a_round(readers)
            most = by_loader + by_sampler
            if most and id(loader) not in faulty:
                whole = [a for a in made if len(a.epochs) == len(readers) and a.complete]
                audit = next((a for a in whole if 0 < a.never <= most), None)
                if audit is not None:
                    yield from self._judge(run, loader, audit, whole, by_loader)

    def _judge(
        self, run: Run, loader: Loader, audit: Audit, whole: list[Audit], by_loader: int
    ) -> Iterator[Finding]:
        reader = loader.readers[min(audit.epochs)]
        share = audit.never * audit.sampled / audit.length
        if loader.trains and _shuffled(audit) and (share < SMALL_TAIL or _others_each_time(whole)):
            return
        if _read_elsewhere(run, loader, audit):
            return
        missing, count = audit.unseen(), audit.never * audit.sampled
        by = "its BatchSampler" if reader.seen.batches_given else "the loader"
        by_sampler = max(0, count - by_loader) if reader.seen.sampler_drop_last else 0
        mostly_sampler = by_sampler >= by_loader
        made = f"{'the sampler' if mostly_sampler else by} was made with drop_last=True"
        if by_sampler and by_loader:
            made = (
                f"both were made with drop_last=True: {by} drops {by_loader} that fill no batch, "
                f"the sampler {by_sampler} that do not go round all ranks"
            )
        yield self.finding(
            ranks=tuple(audit.epochs),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at if mostly_sampler else reader.made_at,
            label="drops what does not fill up",
            related=related(reader, sampler=bool(by_sampler) and not mostly_sampler),
            summary=f"{count} of {dataset(reader)} are never seen in "
            f"an epoch of {use(loader)}" + (f" (indices {some(missing, 6)})" if missing else ""),
            cause=made,
            fix=_fix_training(audit) if loader.trains else _fix_evaluation(reader, by_loader),
            evidence={**figures(audit), "never seen, for example": spelled(missing)},
            at=reader.rank.wall(audit.epochs[min(audit.epochs)].began.at),
        )


def _fix_training(audit: Audit) -> str:
    shuffle = "" if _shuffled(audit) else ", or shuffle"
    return f"leave `drop_last` out where every sample must count{shuffle}"


def _fix_evaluation(reader: Reader, by_loader: int) -> str:
    """Without `drop_last` a sampler would hand some samples to two ranks, unless they go round."""
    seen = reader.seen
    sums = "sum totals and counts over the ranks once after the loop"
    if not seen.distributed or not (seen.sampler_drop_last or seen.length % seen.replicas):
        return f"leave `drop_last` out, and {sums}"
    without = ", without `drop_last` on the loader" if by_loader else ""
    once = "`sampler=range(rank, len(dataset), world_size)`"
    return f"read each sample once with {once}{without}, and {sums}"


def _dropped(reader: Reader) -> int:
    """How many of the samples given to a rank the loader drops, since they fill no batch."""
    seen = reader.seen
    given = seen.sampler_length
    if given < 0 and not seen.own_order:
        given = seen.total_size // seen.replicas if seen.distributed else seen.length
    return given % seen.batch_size if seen.drop_last and seen.batch_size and given > 0 else 0


def _of_a_round(readers: list[Reader]) -> int:
    """How many samples at most do not go round all ranks."""
    seen = readers[0].seen
    if not seen.sampler_drop_last:
        return 0
    known = seen.total_size > 0 and not seen.own_order
    return max(0, seen.length - seen.total_size if known else seen.replicas - 1)


def _shuffled(audit: Audit) -> bool:
    ended = audit.epochs[min(audit.epochs)].ended
    return ended is not None and not in_order(ended)


def _others_each_time(whole: list[Audit]) -> bool:
    """Each epoch has an order of its own, and leaves out others."""
    orders = {e.ended.order for a in whole if (e := a.epochs[min(a.epochs)]).ended is not None}
    return len(orders) == len(whole) > 1


def _read_elsewhere(run: Run, loader: Loader, audit: Audit) -> bool:
    """Whether other loaders read what this one leaves out."""
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
    """Which indices of one loader's data set another loader of the rank read: through the same
    object, or a `Subset` of it."""
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
