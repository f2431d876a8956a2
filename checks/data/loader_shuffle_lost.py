"""DDP509."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.content import Agreement, by_index, compare
from ddpdoctor.analysis.data.loader_check import LoaderCheck, dataset, related, spelled
from ddpdoctor.analysis.data.loaders import Loader, Reader, in_order, loaders
from ddpdoctor.analysis.data.thresholds import FEWEST_ASCENDING
from ddpdoctor.report.findings import Finding, FixKind, Severity
from ddpdoctor.run import Run


class LoaderShuffleLost(LoaderCheck):
    """Training reads the data unshuffled

    ## What it finds
    A distributed sampler with `shuffle=False` in a training loop: the indices are in ascending
    order in every epoch. Also if `random_split` or a `Subset` shuffled the data once before: then
    every epoch has that order.

    ## How it knows
    When the loader is first iterated, each rank records the `shuffle` of its sampler; for every
    epoch, it records the first 16 indices and whether indices ever fell. On all ranks and in all
    training epochs of 16 samples or more they must never fall, or at least the first 16 must rise.
    If the data was shuffled before, two epochs must hold the same samples at the same indices, by
    digests of some. The finding is proven.

    ## Why it hurts
    Batches hold neighbours, often of one class, and are the same in every epoch (if the data was
    shuffled before, they are only the same). This mostly happens when `shuffle=True` is removed
    from the loader to add the sampler.

    ## How to fix it
    Remove `shuffle=False` from the sampler, and call `sampler.set_epoch(epoch)` every epoch.

    ## When it stays quiet
    - Evaluation.
    - A single epoch over data that was shuffled before, or several epochs that each shuffle it
      anew.
    - Fewer than 16 samples.
    """

    code = "DDP509"
    name = "loader-shuffle-lost"
    severity = Severity.NOTE
    rules: ClassVar[Mapping[str, str]] = {
        "ascending-order": "the sampler yields ascending indices in every training epoch",
        "fixed-order": "the dataset was shuffled once, and every epoch has that order",
    }

    def examine(self, run: Run) -> Iterable[Finding]:
        for loader in loaders(run):
            readers = [r for r in loader.readers.values() if _in_order(r)]
            if loader.trains and readers and len(readers) == len(loader.readers):
                yield self._report(loader, readers)

    def _report(self, loader: Loader, readers: list[Reader]) -> Finding:
        reader, shuffled = readers[0], _shuffled_before(readers[0])
        order = "the same order" if shuffled else "ascending order"
        return self.of_reader(
            reader,
            rule="fixed-order" if shuffled else "ascending-order",
            ranks=tuple(r.rank.rank for r in readers),
            location=reader.sampler_at,
            label="shuffle=False",
            related=related(reader, sampler=False),
            summary=f"training reads {dataset(reader)} in {order} in "
            + (f"each of {count} epochs" if (count := len(reader.epochs)) > 1 else "its one epoch"),
            cause=f"{reader.seen.sampler} has shuffle=False"
            + (", and the data was shuffled only once, when it was split" if shuffled else ""),
            fix="`DistributedSampler(dataset)` shuffles by default; call "
            "`sampler.set_epoch(epoch)` at the start of every epoch",
            fix_kind=FixKind.CHECK,
            evidence={
                "first indices": {
                    r.rank.rank: spelled(e.head[:8])
                    for r in readers[:8]
                    if (e := r.epochs[0].ended)
                }
            },
        )


def _in_order(reader: Reader) -> bool:
    """Whether all training epochs of a rank came in the dataset's own order."""
    seen = reader.seen
    ended = reader.training_ends
    return (
        seen.distributed
        and seen.shuffle is False
        and bool(ended)
        and all(in_order(e) and e.samples >= FEWEST_ASCENDING for e in ended)
        and (not _shuffled_before(reader) or (len(ended) > 1 and _repeats(reader)))
    )


def _shuffled_before(reader: Reader) -> bool:
    """Whether a split put the data in another order before."""
    return any(p.kind == "indices" and not p.ascending for p in reader.seen.payloads)


def _repeats(reader: Reader) -> bool:
    """Whether the second epoch held the same samples at the same indices as the first."""
    return compare(by_index(reader, 0), by_index(reader, 1)) is Agreement.SAME
