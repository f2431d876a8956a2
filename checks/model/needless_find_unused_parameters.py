"""DDP303."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrap_options import WrapOptions
from ddpdoctor.events import SearchCost, SyncPattern
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, Severity
from ddpdoctor.run import Rank, Run, counted, plural, title_of

ENOUGH = 5
"""Examined backwards that suffice to call the option needless."""

STATIC = (
    "; if something else requires it (re-entrant checkpointing, a parameter that no step uses), "
    "{static} avoids the search, as long as the graph never changes"
)


class NeedlessFindUnusedParameters(Check):
    """find_unused_parameters=True, but every parameter was used in every step

    ## What it finds
    A model wrapped with `find_unused_parameters=True` all of whose parameters got a gradient in
    every synchronising backward that was examined, on every rank.

    ## How it knows
    In the first eight synchronising backwards of a model, and then in every 8th (every 16th after
    128; in a large model, one in half as many as it has parameters), hooks on all parameters show
    which of them get a gradient. DDP's search is timed in every synchronising forward. At least
    five backwards must have been examined on every rank. The finding says how many were examined,
    of how many: it is proven if all were, otherwise suspected.

    ## Why it hurts
    With this option, DDP traverses the whole autograd graph after each forward, and exchanges a map
    of the used parameters in each backward. The finding says how long that took in this run.

    ## How to fix it
    Wrap without the option. If parameters are unused, but the same ones in every step,
    `static_graph=True` is cheaper; it is proposed unless some forwards ran under `no_sync`, which a
    static graph does not support at the start of a run.

    ## When it stays quiet
    - Some rank did not use a parameter in an examined backward.
    - Fewer than five backwards were examined.
    - The run failed, perhaps in the first backward that leaves a parameter out.
    """

    code = "DDP303"
    name = "needless-find-unused-parameters"
    family = "model"
    severity = Severity.NOTE
    requires = (models.needs_ddp,)

    def examine(self, run: Run) -> Iterable[Finding]:
        if run.outcome() in ("failed", "hung", "killed"):
            return
        for model in models.numbers(run):
            ranks = [r for r in run.ranks.values() if models.wrap_of(r, model) is not None]
            uses = [models.use_of(r, model) for r in ranks]
            enough = all(u is not None and u.examined >= ENOUGH and not u.unused for u in uses)
            quiet = all(not e.indices for r in ranks for e in models.sets_of(r, model))
            sets = [e for r in ranks for e in models.sets_of(r, model)]
            asked = all(e.find_unused and not e.static_graph for e in sets)
            reported = all(models.sets_of(r, model) for r in ranks)
            if ranks and enough and quiet and asked and reported:
                yield self._report(ranks, model)

    def _report(self, ranks: list[Rank], model: int) -> Finding:
        rank = ranks[0]
        wrapped = models.wrap_of(rank, model)
        use = models.use_of(rank, model)
        assert wrapped is not None and use is not None
        ddp = WrapOptions(wrapped)
        static = ddp.static if wrapped.by else "`static_graph=True`"
        unseen = use.backwards - use.examined
        unsynced = any(e.unsynced for r in ranks for e in r.of(SyncPattern) if e.model == model)
        return self.finding(
            confidence=Confidence.SUSPECTED if unseen > 0 else Confidence.PROVEN,
            ranks=tuple(r.rank for r in ranks),
            subjects=(title_of(rank, wrapped),),
            location=rank.location(wrapped.site),
            label="the search finds nothing",
            summary=f"find_unused_parameters=True, but all {len(wrapped.parameters)} parameters of "
            f"{title_of(rank, wrapped)} were used in each of {use.examined} backwards examined"
            + (f" of {use.backwards}" if unseen > 0 else ""),
            cause="DDP searches the autograd graph for unused parameters in every step. There were "
            "none in the examined steps, and the graph was the same in each of them",
            fix=(ddp.drop_unused if wrapped.by else "remove the option")
            + (
                ", if no batch can skip a part of the model on any rank: "
                f"{counted(unseen, 'backward')} {plural(unseen, 'was', 'were')} not examined, and "
                "one such batch would end the run"
                if unseen > 0
                else ""
            )
            + ("" if unsynced else STATIC.format(static=static)),
            evidence={
                "backwards examined": use.examined,
                "backwards": use.backwards,
                **_cost(rank, model),
            },
            at=rank.wall(wrapped.at),
        )


def _cost(rank: Rank, model: int) -> Evidence:
    """How long DDP's search took, as evidence."""
    costs = [c for c in rank.of(SearchCost) if c.model == model]
    if not costs or not costs[-1].searches:
        return {"time of the search": "not measured"}
    last = costs[-1]
    return {
        "search ms per step": round(1000 * last.seconds / last.searches, 3),
        "search s in all": round(last.seconds, 3),
    }
