"""DDP509."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.data.content import by_index, compare
from ddpdoctor.analysis.data.loaders import Loader, Reader, in_order, loaders
from ddpdoctor.analysis.data.phrases import dataset, no_loader, related, spelled
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run

FEWEST = 16
"""Samples per epoch below which an order in ascending indices tells nothing."""


class LoaderShuffleLost(Check):
    """Training reads the data in its own order

    ## What it finds
    A distributed sampler with `shuffle=False` in a loop that trains: the indices came in ascending
    order in every epoch. So where `random_split` or a `Subset` has mixed the data before, once and
    for all: every epoch has that order.

    ## How it knows
    When the loader is first iterated, each rank records the `shuffle` of its sampler; of every
    epoch whether the indices delivered ever fell, and the first 16. On all ranks and in all epochs
    that train these must never fall, or at least the first 16 rise, over 16 samples or more. Of
    data that was mixed before, two epochs must hold the same samples at the same indices, by
    digests of some. The finding is proven.

    ## Why it hurts
    Batches hold neighbours (often of one class) and are the same in every epoch; of data that was
    mixed before, only the latter. It mostly happens when `shuffle=True` of the loader is dropped to
    make room for the sampler.

    ## How to fix it
    Leave `shuffle=False` out of the sampler, and call `sampler.set_epoch(epoch)` every epoch.

    ## When it stays quiet
    Evaluation; a single epoch over data that a split has put in random order before, or several
    that each mix it anew; a handful of samples.
    """

    code = "DDP509"
    name = "loader-shuffle-lost"
    family = "data"
    severity = Severity.NOTE

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            readers = [r for r in loader.readers.values() if _in_order(r)]
            if loader.trains and readers and len(readers) == len(loader.readers):
                yield self._report(loader, readers)

    def _report(self, loader: Loader, readers: list[Reader]) -> Finding:
        reader, mixed = readers[0], _mixed(readers[0])
        order = "the same order" if mixed else "ascending order"
        return self.finding(
            ranks=tuple(r.rank.rank for r in readers),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label="shuffle=False",
            related=related(reader, sampler=False),
            summary=f"training reads {dataset(reader)} in {order} in "
            + (f"each of {count} epochs" if (count := len(reader.epochs)) > 1 else "its one epoch"),
            cause=f"{reader.seen.sampler} was made with shuffle=False"
            + (", and the data was mixed only once, as it was split" if mixed else ""),
            fix="`DistributedSampler(dataset)` shuffles by default; call "
            "`sampler.set_epoch(epoch)` at the top of every epoch",
            fix_kind=FixKind.CHECK,
            evidence={
                "first indices": {
                    r.rank.rank: spelled(e.head[:8])
                    for r in readers[:8]
                    if (e := r.epochs[0].ended)
                }
            },
            at=reader.rank.wall(reader.epochs[0].began.at),
        )


def _in_order(reader: Reader) -> bool:
    seen = reader.seen
    ended = [e.ended for e in reader.epochs if e.ended is not None and e.ended.backwards]
    return (
        seen.distributed
        and seen.shuffle is False
        and bool(ended)
        and all(in_order(e) and e.samples >= FEWEST for e in ended)
        and (not _mixed(reader) or (len(ended) > 1 and _again(reader)))
    )


def _mixed(reader: Reader) -> bool:
    """Whether a split has put the data in another order before."""
    return any(p.kind == "indices" and not p.ascending for p in reader.seen.payloads)


def _again(reader: Reader) -> bool:
    """Whether the second epoch held the same samples at the same indices."""
    return compare(by_index(reader, 0), by_index(reader, 1)) == "same"
