"""DDP505."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.findings import Check, Finding, Severity
from ddpdoctor.run import Run

from ._audit import Audit, audits
from ._loaders import Loader, in_order
from ._verdict import faults
from ._words import dataset, figures, no_loader, related, some, spelled, use

SMALL_TAIL = 0.1
"""Share of the data that shuffled training may leave out of an epoch."""


class SamplerDropsTail(Check):
    """`drop_last` leaves samples unseen

    ## What it finds
    Samples that no rank read in an epoch that ran to its end, because the sampler or the loader
    drops what does not fill a batch or a round of ranks.

    ## Why it hurts
    In evaluation the metric is not that of the whole set. In training without shuffling the same
    samples are never learned from.

    ## How to fix it
    Leave `drop_last` out where every sample must count, and sum counts instead of averaging
    averages; or shuffle, so that each epoch leaves out others.

    ## When it stays quiet
    Shuffled training that leaves out less than a tenth of the data per epoch; epochs that were
    left early; nothing dropped.
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
            drops = any(r.seen.drop_last or r.seen.sampler_drop_last for r in readers)
            if drops and id(loader) not in faulty:
                yield from self._judge(loader, [a for a in made if len(a.epochs) == len(readers)])

    def _judge(self, loader: Loader, made: list[Audit]) -> Iterator[Finding]:
        whole = [a for a in made if a.complete and a.never]
        if not whole:
            return
        audit, reader = whole[0], loader.readers[min(whole[0].epochs)]
        ended = reader.epochs[audit.number].ended
        shuffled = ended is not None and not in_order(ended)
        share = audit.never * audit.sampled / audit.length
        if loader.trains and shuffled and share < SMALL_TAIL:
            return
        by = "the sampler" if reader.seen.sampler_drop_last else "the loader"
        missing = audit.unseen()
        yield self.finding(
            ranks=tuple(audit.epochs),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at if reader.seen.sampler_drop_last else reader.made_at,
            label="drops what does not fill up",
            related=related(reader, sampler=False),
            summary=f"{audit.never * audit.sampled} of {dataset(reader)} are never seen in "
            f"an epoch of {use(loader)}" + (f" (indices {some(missing)})" if missing else ""),
            cause=f"{by} was made with drop_last=True",
            fix="leave `drop_last` out where every sample must count, or shuffle",
            evidence={**figures(audit), "never seen, for example": spelled(missing)},
            at=reader.rank.wall(audit.epochs[min(audit.epochs)].began.at),
        )
