"""DDP506."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.loader_check import (
    LoaderCheck,
    Words,
    dataset,
    figures,
    on_each_rank,
    related,
    steps_from,
    when,
)
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Finding, FixKind, Severity
from ddpdoctor.run import Run, equal_ranks, odd_ones, whom

ORDERS = "the ranks shuffle in different orders and each takes its share of its own"


class SamplerSeedSkew(LoaderCheck):
    """Ranks shuffle with different seeds

    ## What it finds
    Distributed samplers (torch's or custom ones) whose `seed` or `epoch` differs between ranks, and
    samples that several ranks therefore read in one epoch.

    ## How it knows
    When an iteration begins, each rank records the `seed` and `epoch` of its sampler. They are
    compared between ranks that begin it after the same number of optimizer steps, and so are the
    indices delivered (all of them up to 262,144 per line that makes the loader, then one in 2, in 4
    and so on): some must be read by several ranks. The finding is proven.

    ## Why it hurts
    The ranks shuffle in different orders and each takes its share of its own, so some samples are
    read by several ranks and others by none. Nothing fails, and the epoch has the expected length.

    ## How to fix it
    Give all ranks the same `seed` (omit the argument), and call `sampler.set_epoch(epoch)` on every
    rank. Use different seeds per rank for augmentation only, not for the sampler.

    ## When it stays quiet
    - The seeds and epochs are equal.
    - The samplers do not shuffle.
    - Only other random states differ between ranks.
    """

    code = "DDP506"
    name = "sampler-seed-skew"
    severity = Severity.ERROR
    words: ClassVar[Mapping[str, Words]] = {
        "different-seeds": Words(
            "the samplers have different seeds",
            ORDERS,
            "use the same `seed` on all ranks{otherwise}",
        ),
        "different-epochs": Words(
            "every rank calls `set_epoch`, with different numbers",
            f"{ORDERS}: `set_epoch` is called with different numbers",
            "use the same epoch number on all ranks: if the run was resumed, load the same "
            "checkpoint on every rank, or broadcast the epoch from rank 0 (`dist.broadcast`)",
        ),
        "set-epoch-on-some-ranks": Words(
            "some ranks never call `set_epoch`",
            f"{ORDERS}: `set_epoch` is called on some ranks only",
            "call `sampler.set_epoch(epoch)` on every rank, outside of any `if rank == 0:`",
        ),
    }
    rules = when(words)
    effects = (Effect(("sampler-epoch-frozen",), when=(When.SAME_LINE,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in self.faults(run):
            yield self._report(run, fault)

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        seeds = {r: e.began.seed for r, e in audit.epochs.items()}
        numbers = {r: e.began.sampler_epoch for r, e in audit.epochs.items()}
        unset = [r for r, e in audit.epochs.items() if not e.began.epochs_set]
        by_seed = fault.rule == "different-seeds"
        what, given = ("seed", seeds) if by_seed else ("epoch", numbers)
        on_some = fault.rule == "set-epoch-on-some-ranks"
        torchs = reader.seen.sampler == "DistributedSampler"
        omit = ", or omit the argument" if torchs else ": draw it on rank 0 and broadcast it"
        shared = f"{len(audit.shared)} samples are read by "
        if fault.facts:
            shared = "{shared} of the first {first} samples are read by ".format(**fault.facts)
        return self.of_fault(
            fault,
            {"otherwise": omit},
            ranks=tuple(sorted(unset)) if on_some else odd_ones(equal_ranks(given)),
            steps=steps_from(reader, audit.epochs.get(reader.rank.rank)),
            location=reader.sampler_at,
            label=f"the {what} differs between ranks",
            related=related(reader, sampler=False),
            summary=f"the samplers of {dataset(reader)} shuffle by different {what}s "
            f"({on_each_rank(given.items())}): {shared}"
            f"{'several of ' * (len(fault.ranks) > 2)}{whom(fault.ranks, run.world_size)}"
            + (f", {audit.never} by none" if audit.complete and not fault.facts else ""),
            fix_kind=FixKind.SAFE if fault.rule != "different-epochs" and torchs else FixKind.CHECK,
            evidence={
                "seed": seeds,
                "sampler epoch": numbers,
                "set_epoch called on every rank": not unset,
                **figures(audit),
            },
        )
