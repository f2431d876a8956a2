"""DDP412."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.meshes.own_factors import OwnFactors, own_factors
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import (
    Clipped,
    ClippedScaled,
    EditedBeforeSync,
    ShardScales,
    SyncPattern,
    UnwrappedState,
)
from ddpdoctor.report.declarations import seen, several_ranks
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, counted, ranks_do, ranks_text, title_of

LEAST_STEPS = 2
"""A single step may be a trial."""

UNEQUAL = 1.001
"""Ratio of factors that differ: far more than rounding makes of one and the same factor."""

MICRO_BATCHES = "clipped-micro-batches"
BY_HAND = "clipped-before-averaging-by-hand"
SCALED = "scaled-by-local-factors"
OWN_FACTOR = "own-factor-on-shards"
WHILE_SCALED = "clipped-while-scaled"

CAUSES = {
    MICRO_BATCHES: "each rank limits the sum of its own micro-batches so far, again and again as "
    "the next ones are added; clipping and averaging cannot change places",
    BY_HAND: "each rank limits its own gradients, so that the ranks' shares of the mean depend on "
    "their norms; clipping and averaging cannot change places",
    SCALED: "the factor was taken from this rank's own gradients or batch, so that the ranks' "
    "shares of the mean depend on it",
}
FIXES = {
    MICRO_BATCHES: "clip once per step, after the backward that is not under `no_sync()`, right "
    "before `{step}`",
    BY_HAND: "clip after the gradients were averaged, right before `{step}`",
    SCALED: "scale once per step, after the backward that averages the gradients, right before "
    "`{step}`",
}
NORMS = (
    "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "model.clip_grad_norm_(max_norm)",
)
"""What limits the norm of all shards: of DTensors, and of `FullyShardedDataParallel`."""
Seen = dict[Rank, list[EditedBeforeSync]]


class ClipBeforeSync(Check):
    """Gradients are clipped or scaled before they are averaged over the ranks

    ## What it finds
    `clip_grad_norm_`, `clip_grad_value_` or a factor of the program's own that changes the
    gradients of micro-batches under `no_sync()`, or those that the program is yet to average by its
    own collectives. For sharded models (`fully_shard`, `FullyShardedDataParallel`): factors by
    which each rank multiplies its shards of the averaged gradients, and which differ between ranks.
    And gradients that are clipped before `GradScaler` divides them by the loss scale.

    ## How it knows
    After each backward that does not synchronise, each rank reads a few values of the gradients,
    and again after calls that clip and before the next backward. They must have changed without
    being cleared, and have been averaged before the step, by a synchronised backward or by
    collectives that carried all of them, in two steps or more. That proves the change. Factors of
    the program's own must differ between ranks. Not every step is examined in long runs.
    Of shards, each rank reads a few values of six gradients at the end of each backward and when
    the step begins. The fault is that most of them were multiplied by one factor, that these
    factors are not those of the other ranks of the mesh, and that this is so in two steps or more:
    as when a norm is computed of the rank's own shards and not summed over the ranks.
    With a `GradScaler`, the order of the calls decides: a clip that follows the last backward, and
    `unscale_`, by the program or within `scaler.step`, only after it, in two steps or more.

    ## Why it hurts
    The step does not have the limit that was asked for: outliers of single micro-batches and ranks
    decide how much of the others is kept, so the result depends on the number of ranks and of
    micro-batches. A limit of 1 on gradients that are 65,536 times too large is one of 0.00002:
    nearly every step is cut down to it. Shards with factors of their own are no longer parts of one
    gradient: the step goes in another direction.

    ## How to fix it
    Clip once per step, after the last backward (outside of `no_sync()`) and right before
    `optimizer.step()`. Of DTensors, `torch.nn.utils.clip_grad_norm_` computes the norm over all
    shards, of `FullyShardedDataParallel` its own `clip_grad_norm_`; by hand, `dist.all_reduce` the
    sum of squares before the root. With a `GradScaler`, `scaler.unscale_(optimizer)` first.

    ## When it stays quiet
    - Clipping after the averaged backward, or after the program's own all-reduce.
    - Gradients of single samples, clipped several times per step and cleared each time (DP-SGD).
    - Clipping that changes nothing, as the norm is below the limit or only measured.
    - Gradients that are cleared afterwards, or applied without being averaged (local SGD).
    - One factor for all gradients that is the same on all ranks.
    - Gradients on a GPU, as reading them would block it; a few values of shards are copied instead.
    - Shards that are changed in other ways: value by value, row by row, or exchanged.
    - A limit that is at least the loss scale, as one that is multiplied by it; `unscale_` for any
      optimizer after the last backward and before the clip.
    - Ranks that train other shards, as the stages of a pipeline do.
    """

    code = "DDP412"
    name = "clip-before-sync"
    family = "drift"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        MICRO_BATCHES: "gradients are clipped after backwards that DDP does not synchronise",
        BY_HAND: "gradients are clipped before the program averages them by itself",
        SCALED: "gradients are scaled before they are averaged, by factors that differ by rank",
        WHILE_SCALED: "gradients are clipped while they are multiplied by the loss scale",
        OWN_FACTOR: "ranks multiply their shards of the averaged gradients by different factors",
    }
    requires = (
        several_ranks,
        seen(
            SyncPattern,
            UnwrappedState,
            ShardScales,
            ClippedScaled,
            otherwise="no step with gradients of several ranks",
        ),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        keys = {(e.model, e.optimizer) for r in run.ranks.values() for e in r.of(EditedBeforeSync)}
        for key in sorted(keys):
            events = {
                rank: mine
                for rank in run.ranks.values()
                if (mine := [e for e in rank.of(EditedBeforeSync) if (e.model, e.optimizer) == key])
            }
            yield from self._judge(events)
        for shards in own_factors(run):
            yield self._own_factor(shards)
        for line, scaled in run.by_line(ClippedScaled).items():
            steps = {s for number in scaled for s in _steps_of(run.ranks[number], line)}
            if len(steps) >= LEAST_STEPS:
                yield self._while_scaled(run, line, scaled, steps)

    def _while_scaled(
        self, run: Run, line: Location, events: Mapping[int, ClippedScaled], steps: set[int]
    ) -> Finding:
        number, event = next(iter(events.items()))
        rank = run.ranks[number]
        divides = rank.location(event.unscale_site)
        told = f" ({event.scale:g})" if event.scale else ""
        if event.limit and event.scale:
            told += f": what is to be limited to {event.limit:g} is limited to "
            told += f"{event.limit / event.scale:.2g}"
        return self.finding(
            rule=WHILE_SCALED,
            ranks=tuple(events),
            steps=Steps(min(steps), max(steps), len(steps), len(steps)),
            location=line,
            label="clips gradients that are multiplied by the loss scale",
            related=(Related("divides them by the scale, too late", divides),) if divides else (),
            summary=f"`{event.function}` comes before `GradScaler` divides the gradients by the "
            f"loss scale{told}",
            cause="after `scaler.scale(loss).backward()` all gradients are multiplied by the "
            "scale; `scaler.step` divides them by it, unless `scaler.unscale_` was called before",
            fix="call `scaler.unscale_(optimizer)` right before the gradients are clipped",
            fix_kind=FixKind.CHECK,
            evidence={"scale": event.scale or "on a device, not read", "limit": event.limit},
            at=rank.wall(event.at),
        )

    def _judge(self, every: Seen) -> Iterator[Finding]:
        clipped = {
            rank: mine
            for rank, events in every.items()
            if len(mine := [e for e in events if e.function]) >= LEAST_STEPS
        }
        if any(_each_sample(rank, mine) for rank, mine in clipped.items()):
            return
        if clipped:
            by_hand = next(iter(clipped.values()))[0].by_hand
            yield self._finding(clipped, BY_HAND if by_hand else MICRO_BATCHES)
        elif scaled := _by_local_factors(every):
            yield self._finding(scaled, SCALED)

    def _finding(self, events: Seen, rule: str) -> Finding:
        rank, (event, *_) = next(iter(events.items()))
        wrapped = models.wrap_of(rank, event.model)
        steps = {e.step for mine in events.values() for e in mine}
        spot = rank.location(event.site)
        backward = rank.location(event.backward_site)
        factors = {
            f"rank {r.rank}": f"{min(known):.2g} to {max(known):.2g}"
            for r, mine in events.items()
            if (known := [e.factor for e in mine if e.factor])
        }
        what = f"`{event.function}` changes" if event.function else "the program scales"
        whose = f" of {title_of(rank, wrapped)}" if wrapped else ""
        return self.finding(
            rule=rule,
            ranks=tuple(sorted(r.rank for r in events)),
            steps=Steps(min(steps), max(steps), len(steps)),
            subjects=(wrapped.kind,) if wrapped else (),
            optimizers=(event.optimizer,),
            location=spot or backward,
            label="changes gradients that are not averaged yet"
            if spot
            else "its gradients are scaled before they are averaged",
            related=(Related("does not average", backward),) if spot and backward else (),
            summary=f"{what} the gradients{whose} before they are averaged, on "
            f"{ranks_text(r.rank for r in events)} in {counted(len(steps), 'step')}",
            cause=CAUSES[rule],
            fix=FIXES[rule].format(step="optimizer.step()"),
            fix_kind=FixKind.CHECK,
            evidence={"times_per_step": event.times, "factors_by_rank": factors},
            at=rank.wall(event.at),
        )

    def _own_factor(self, shards: OwnFactors) -> Finding:
        rank, (event, *_) = next(iter(shards.events.items()))
        spots = ((r, e) for r, events in shards.events.items() for e in events)
        spot = next((found for r, e in spots if (found := r.location(e.site))), None)
        stepped, backward = rank.location(event.step_site), rank.location(event.backward_site)
        related = [("the backward before it", backward), ("applied here", spot and stepped)]
        scaling = tuple(r.rank for r in shards.events)
        who = f"{ranks_text(shards.ranks)} multiply their shards of the gradients by different"
        if len(scaling) < len(shards.ranks):
            own = "its" if len(scaling) == 1 else "their"
            who = f"only {ranks_do(scaling, 'scale')} {own} shards of the gradients, by different"
        return self.finding(
            rule=OWN_FACTOR,
            ranks=scaling,
            steps=Steps(min(shards.steps), max(shards.steps), len(shards.steps)),
            optimizers=(event.optimizer,),
            location=spot or stepped,
            label="multiplies this rank's shards by a factor of its own"
            if spot
            else "applies shards that each rank has scaled by a factor of its own",
            related=tuple(Related(label, line) for label, line in related if line),
            summary=f"{who} factors before the step, in {counted(len(shards.steps), 'step')}",
            cause="each rank holds only its shards of the gradients, and computed the factor from "
            "these alone (their norm, say) or from its own batch; scaled differently, they are no "
            "longer parts of one gradient",
            fix=f"use one factor on all ranks: `{NORMS[event.flat]}` computes the norm over all "
            "shards; by hand, `dist.all_reduce` the sum of squares of the shards before the root",
            fix_kind=FixKind.CHECK,
            evidence={
                "factors_by_rank": {
                    f"rank {n}": f"{min(known):.2g} to {max(known):.2g}"
                    for n, known in shards.factors.items()
                },
                f"factors_in_step_{min(shards.steps)}": {
                    f"rank {n}": f"{known[0]:.4g}" for n, known in shards.factors.items()
                },
            },
            at=rank.wall(event.at),
        )


def _each_sample(rank: Rank, events: list[EditedBeforeSync]) -> bool:
    """Whether a rank clips several times per step gradients that it clears each time: those of
    single samples, which it adds up itself (DP-SGD)."""
    last = max((e for e in rank.of(Clipped) if e.site == events[0].site), key=_number, default=None)
    often = last is not None and last.call + 1 >= 2 * (last.step + 1)
    return often and all(e.by_hand and e.times == 1 for e in events)


def _number(event: Clipped) -> int:
    return event.call


def _by_local_factors(every: Seen) -> Seen:
    """The changes by the program itself in steps in which the factors of the ranks differ; empty
    if these are too few."""
    factors: dict[int, set[float]] = {}
    for events in every.values():
        for e in events:
            factors.setdefault(e.step, set()).add(e.factor)
    differing = {n for n, known in factors.items() if min(known) * UNEQUAL < max(known)}
    differing -= {n for n, known in factors.items() if 0.0 in known}
    if len(every) < 2 or len(differing) < LEAST_STEPS:
        return {}
    return {rank: [e for e in events if e.step in differing] for rank, events in every.items()}


def _steps_of(rank: Rank, line: Location) -> set[int]:
    """The steps before which a line clips scaled gradients."""
    return {e.step for e in rank.of(ClippedScaled) if rank.location(e.site) == line}
