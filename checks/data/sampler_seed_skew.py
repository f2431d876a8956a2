"""DDP506."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.data.loader_faults import LoaderFault, of_check
from ddpdoctor.analysis.data.phrases import dataset, figures, no_loader, related, steps_from
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, equal_ranks, odd_ones, whom


class SamplerSeedSkew(Check):
    """Ranks shuffle with different seeds

    ## What it finds
    Distributed samplers (torch's, or of one's own) whose `seed` or `epoch` differs between ranks,
    and samples that several ranks then really read in one epoch.

    ## How it knows
    As an iteration begins, each rank records the `seed` and `epoch` of its sampler. They are
    compared between ranks that begin it after as many optimizer steps, and so are the indices that
    are then delivered (all of them up to 262,144 per line that makes the loader, then one in 2, in
    4 and so on): some must be read by several ranks. The finding is proven.

    ## Why it hurts
    Each rank takes its share of another order: some samples are read by several ranks, others by
    none. Nothing fails, the epoch is as long as it should be.

    ## How to fix it
    Give all ranks the same `seed` (leave it out), and call `sampler.set_epoch(epoch)` on every
    rank. Seeds that should differ between ranks are those of augmentation, not of the sampler.

    ## When it stays quiet
    Seeds that agree; samplers that do not shuffle; random states of the ranks that differ
    elsewhere.
    """

    code = "DDP506"
    name = "sampler-seed-skew"
    family = "data"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return no_loader(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in of_check(run, self.name):
            yield self._report(run, fault)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check == "sampler-epoch-frozen" and other.location == mine.location

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        seeds = {r: e.began.seed for r, e in audit.epochs.items()}
        numbers = {r: e.began.sampler_epoch for r, e in audit.epochs.items()}
        by_seed = len(set(seeds.values())) > 1
        set_by_all = all(e.began.epochs_set for e in audit.epochs.values())
        what = "seed" if by_seed else "epoch"
        given = seeds if by_seed else numbers
        listed = ", ".join(f"{v} on rank {r}" for r, v in sorted(given.items())[:4])
        unset = [r for r, e in audit.epochs.items() if not e.began.epochs_set]
        odd = odd_ones(equal_ranks(given)) if by_seed or set_by_all else tuple(sorted(unset))
        why, fix, kind = _advice(by_seed=by_seed, set_by_all=set_by_all)
        return self.finding(
            ranks=odd,
            steps=steps_from(reader, audit.epochs.get(reader.rank.rank)),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label=f"the {what} differs between ranks",
            related=related(reader, sampler=False),
            summary=f"the samplers of {dataset(reader)} shuffle by different {what}s ({listed}): "
            f"{len(audit.shared)} samples read by {'several of ' * (len(fault.ranks) > 2)}"
            f"{whom(fault.ranks, run.world_size)}"
            + (f", {audit.never} by none" if audit.complete else ""),
            cause=f"every rank takes its share of an order of its own{why}",
            fix=fix,
            fix_kind=kind,
            evidence={
                "seed": seeds,
                "epoch of the sampler": numbers,
                "each rank set its epoch": set_by_all,
                **figures(audit),
            },
            at=reader.rank.wall(audit.at),
        )


def _advice(*, by_seed: bool, set_by_all: bool) -> tuple[str, str, FixKind]:
    """What more there is to say of the cause, and what to do."""
    if by_seed:
        return "", "the same `seed` on all ranks (leave it out)", FixKind.SAFE
    if set_by_all:
        return (
            "; each rank called `set_epoch`, with different numbers",
            "count epochs alike on all ranks: where a run is resumed, every rank must load the "
            "same snapshot, or be told the epoch by rank 0 (`dist.broadcast`)",
            FixKind.CHECK,
        )
    return (
        "; `set_epoch` was not called alike on all ranks",
        "call `sampler.set_epoch(epoch)` on every rank, outside of any `if rank == 0:`",
        FixKind.SAFE,
    )
