"""DDP506."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.data.fault import LoaderFault
from ddpdoctor.analysis.data.loader_faults import of_check
from ddpdoctor.analysis.data.phrases import (
    dataset,
    figures,
    no_loader,
    on_each_rank,
    related,
    steps_from,
)
from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity
from ddpdoctor.run import Run, equal_ranks, odd_ones, whom


class SamplerSeedSkew(Check):
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
    family = "data"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "different-seeds": "the samplers have different seeds",
        "different-epochs": "every rank calls `set_epoch`, with different numbers",
        "set-epoch-on-some-ranks": "some ranks never call `set_epoch`",
    }
    requires = (no_loader,)
    effects = (Effect(("sampler-epoch-frozen",), when=(When.SAME_LINE,)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in of_check(run, self.name):
            yield self._report(run, fault)

    def _report(self, run: Run, fault: LoaderFault) -> Finding:
        audit, reader = fault.audit, fault.readers[0]
        assert audit is not None
        seeds = {r: e.began.seed for r, e in audit.epochs.items()}
        numbers = {r: e.began.sampler_epoch for r, e in audit.epochs.items()}
        by_seed = len(set(seeds.values())) > 1
        set_by_all = all(e.began.epochs_set for e in audit.epochs.values())
        what = "seed" if by_seed else "epoch"
        given = seeds if by_seed else numbers
        unset = [r for r, e in audit.epochs.items() if not e.began.epochs_set]
        culprits = odd_ones(equal_ranks(given)) if by_seed or set_by_all else tuple(sorted(unset))
        rule = (
            "different-seeds"
            if by_seed
            else "different-epochs"
            if set_by_all
            else "set-epoch-on-some-ranks"
        )
        why, fix, kind = ADVICE[rule]
        return self.finding(
            rule=rule,
            ranks=culprits,
            steps=steps_from(reader, audit.epochs.get(reader.rank.rank)),
            subjects=(reader.seen.dataset,),
            location=reader.sampler_at,
            label=f"the {what} differs between ranks",
            related=related(reader, sampler=False),
            summary=f"the samplers of {dataset(reader)} shuffle by different {what}s "
            f"({on_each_rank(given.items())}): {len(audit.shared)} samples are read by "
            f"{'several of ' * (len(fault.ranks) > 2)}{whom(fault.ranks, run.world_size)}"
            + (f", {audit.never} by none" if audit.complete else ""),
            cause=f"the ranks shuffle in different orders and each takes its share of its own{why}",
            fix=fix,
            fix_kind=kind,
            evidence={
                "seed": seeds,
                "sampler epoch": numbers,
                "set_epoch called on every rank": set_by_all,
                **figures(audit),
            },
            at=reader.rank.wall(audit.at),
        )


ADVICE: Mapping[str, tuple[str, str, FixKind]] = {
    "different-seeds": ("", "use the same `seed` on all ranks, or omit the argument", FixKind.SAFE),
    "different-epochs": (
        ": `set_epoch` is called with different numbers",
        "use the same epoch number on all ranks: if the run was resumed, load the same checkpoint "
        "on every rank, or broadcast the epoch from rank 0 (`dist.broadcast`)",
        FixKind.CHECK,
    ),
    "set-epoch-on-some-ranks": (
        ": `set_epoch` is called on some ranks only",
        "call `sampler.set_epoch(epoch)` on every rank, outside of any `if rank == 0:`",
        FixKind.SAFE,
    ),
}
"""By rule: what it adds to the cause, the fix, and the kind of fix."""
