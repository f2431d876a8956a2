"""DDP305."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import msgspec

from ddpdoctor.analysis.manual_sync import (
    independent_models,
    model_parallel,
    other_exchanges,
    partly_synced,
    sequence_parallel,
    unused_allreduce,
)
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.events import (
    GroupReady,
    OptimizerSeen,
    StepDone,
    TorchLoaded,
    Unwrapped,
    UnwrappedState,
)
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_text

GROUP = "gradients of a group"
HOOKS = "in backward"
ENOUGH = 0.5
"""Numbers exchanged per step and parameter that may be gradients."""


class ModelNotWrapped(Check):
    """A model is trained that nothing synchronises

    ## What it finds
    Several ranks with a process group step an optimizer on parameters that no wrapper was given,
    whose gradients differ between the ranks when they are applied, and that no collective carried
    since the first step, or only after they were applied, or only copies of them, what comes of
    which is not written back: each rank trains a model of its own. Of an optimizer that keeps some
    parameters equal in its own step, and of hooks that exchange gradients in the backward, those
    are named that part. That one rank gave its parameters
    to the others before it makes them equal once, and does not keep them so. Also such models
    beside tensor or sequence parallelism, and on ranks beside a group of others that average
    theirs.

    ## How it knows
    Parameters without a wrapper are listed at an optimizer's first step; before steps 0, 1, 2, 4, 8
    and so on they and their gradients are digested, and of every collective it is noted what memory
    it carries, and how much. The digests of a step are compared between the ranks: proven is what
    differs at each of these steps and was carried by nothing; or by those collectives in the
    backward that carry as many numbers as the gradients have that are equal. It is a note, and
    suspected, where the ranks begin with other values, as the members of an ensemble do, that no
    rank gave to the others, beside no wrapped model and no sampler that deals out the data. It is
    suspected beside tensor
    parallelism, where the parameters were sent over a group before the first step and that group
    exchanges next to nothing afterwards (losses); beside all_to_all in forward and backward
    (sequence parallelism), where all parameters begin alike on all ranks, each gets another
    gradient on each rank, and nothing is exchanged before a step; and on ranks that begin like
    those that average in a group without them.

    ## Why it hurts
    The run looks distributed and is N separate runs, each on its share of the data. The model that
    rank 0 saves has seen 1/N of it.

    ## How to fix it
    `model = DistributedDataParallel(model)` before the optimizer is built, and call that.

    ## When it stays quiet
    Gradients or parameters that are exchanged by hand (each alone, in flat buffers, in hooks, in
    the optimizer's own step, averaged now and then, or what they changed by); FSDP and tensor
    parallelism; pipelines; training on one rank only; ranks that hold different models; searches
    without such a sampler, in which the models that one line makes differ in shape between the
    ranks, or are trained with other options (learning rate, weight decay) from the first step on;
    models of a line that makes three or more beside a wrapped one (adapted for a few steps);
    what an exchange by hand leaves out of a model that it carries otherwise, of which
    `parameter-drift` tells; copies of what DDP averages (flat, or in another precision). Where
    ranks agree bit for bit and exchange no gradients (same data, same seed) it is a note; none
    where no backward makes the gradients and something else is exchanged (evolution strategies),
    or objects that are large enough to hold them, in half of the steps.
    """

    code = "DDP305"
    name = "model-not-wrapped"
    family = "model"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if run.world_size < 2:
            return "one rank only"
        if not run.any(GroupReady):
            return "no process group was formed"
        if any(e.late for r in run.ranks.values() for e in r.of(TorchLoaded)):
            return "torch was found only after it was used: what was wrapped before is not known"
        if run.any(Unwrapped):
            return None
        if not run.training_ranks():
            return "no optimizer step seen"
        seen = [e for r in run.ranks.values() for e in r.of(OptimizerSeen)]
        if seen and not any(e.models for e in seen):
            return "the optimizers step inside the backward, or on sharded parameters"
        return None

    def examine(self, run: Run) -> Iterable[Finding]:
        optimizers = {e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}
        together: dict[object, list[Finding]] = {}
        for optimizer in sorted(optimizers):
            for alike in _alike(run, optimizer):
                for finding in self._judge(run, optimizer, alike):
                    place = finding.location or optimizer
                    key = (place, finding.cause, finding.ranks, finding.subjects)
                    together.setdefault(key, []).append(finding)
            if found := model_parallel.apart(run, optimizer):
                together.setdefault(("of a group", optimizer), []).append(
                    self._of_group(run, found)
                )
            if copies := sequence_parallel.apart(run, optimizer):
                together.setdefault(("in parts", optimizer), []).append(
                    self._of_parts(run, *copies)
                )
        for first, *others in together.values():
            yield _with(first, others)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if mine.severity is not Severity.ERROR or other.check not in (
            "gradient-drift", "parameter-drift", "unsynced-step"
        ):  # fmt: skip
            return False
        if not other.optimizers or not set(mine.optimizers).isdisjoint(other.optimizers):
            return True
        # What is stepped apart from it differs with it only by what every rank does to it.
        return other.evidence.get("edited_by_hand_on") == sorted(mine.ranks)

    def _judge(self, run: Run, optimizer: int, alike: dict[Rank, Unwrapped]) -> Iterator[Finding]:
        states = {r: {s.step: s for s in _states(r, optimizer)} for r in alike}
        means = {rank: _exchanged(rank, event) for rank, event in alike.items()}
        common = sorted(set.intersection(*(set(rows) for rows in states.values())))
        lone = {rank: event for rank, event in alike.items() if not means[rank]}
        if unused_allreduce.found(run, states):
            plain = self._report(run, alike, Severity.ERROR, common, common[1:])
            yield unused_allreduce.reported(
                plain, alike, models.on_ranks(run, (r.rank for r in alike))
            )
            return
        if not lone and {m for found in means.values() for m in found} == {HOOKS}:
            reported = self._report(run, alike, Severity.ERROR, common, common[1:])
            where = models.on_ranks(run, (r.rank for r in alike))
            if missed := partly_synced.without_hooks(reported, alike, where):
                yield missed
            return
        if len(lone) < len(alike):
            others = [rank for rank in alike if rank not in lone]
            if lone and {m for rank in others for m in means[rank]} == {GROUP}:
                yield from self._beside(run, lone, others, states, common)
            return
        apart = [n for n in common if len({rows[n].gradients for rows in states.values()}) > 1]
        moved = [n for n in common if len({rows[n].parameters for rows in states.values()}) > 1]
        if any(n > moved[0] and n not in moved for n in common if moved):
            return  # equal again: synchronised by means that were not seen
        if len(common) > 1 and apart and not moved:
            return  # equal although gradients differ: exchanged inside the optimizer's own step
        if (
            common
            and common[0] not in moved
            and all(_shared_beside(r, e) for r, e in alike.items())
        ):
            return  # parameter-drift tells what the exchange leaves out
        if common and len(apart) == len(common):
            reported = self._report(run, alike, Severity.ERROR, common, moved)
            if any(s.late for r in states for s in _states(r, optimizer)):
                yield reported
                return
            where = models.on_ranks(run, (r.rank for r in alike))
            if part := partly_synced.left_out(reported, alike, where) or partly_synced.named(
                reported, alike, where
            ):
                yield part
            elif not independent_models.searched(alike) and not independent_models.adapted(alike):
                yield independent_models.doubted(reported, alike)
        elif len(common) > 1 and not apart and not moved and not _talk(alike):
            yield self._report(run, alike, Severity.NOTE, common, moved)

    def _beside(
        self,
        run: Run,
        lone: dict[Rank, Unwrapped],
        others: list[Rank],
        states: dict[Rank, dict[int, UnwrappedState]],
        common: list[int],
    ) -> Iterator[Finding]:
        """Ranks that begin with the values of the others, and are in no group that averages."""
        moved = [n for n in common if len({rows[n].parameters for rows in states.values()}) > 1]
        if len(common) > 2 and common[0] == 0 and moved == common[1:]:
            found = self._report(run, lone, Severity.WARNING, common, moved)
            apart = f"; {ranks_text(r.rank for r in others)} average theirs in a group of their own"
            yield msgspec.structs.replace(
                found,
                confidence=Confidence.SUSPECTED,
                cause=found.cause + apart,
                fix="make the group of all ranks that train this model, or use the default one",
            )

    def _of_group(self, run: Run, found: list[model_parallel.ModelParallel]) -> Finding:
        """Copies that are exchanged in no group of those that begin alike."""
        every = [pair for each in found for pair in each.alike.items()]
        alike = dict(sorted(every, key=lambda pair: pair[0].rank))
        steps = found[0].steps
        reported = self._report(run, alike, Severity.WARNING, steps, steps[1:])
        groups = [sorted(r.rank for r in each.alike) for each in found]
        ranks = " and ".join(ranks_text(group) for group in groups)
        return msgspec.structs.replace(
            reported,
            confidence=Confidence.SUSPECTED,
            cause=f"{ranks} begin with the same parameters, which were sent over their group, and "
            "apply gradients of their own: all they exchange afterwards is less than the "
            "parameters are once; what other groups compute together does not make these equal",
            fix="average the gradients over that group before the step: `dist.all_reduce(p.grad, "
            "group=data_parallel_group)` for every parameter, divided by its size",
            evidence=reported.evidence
            | {
                "groups": [{"ranks": group} for group in groups],
                "numbers exchanged in them since": max(each.exchanged for each in found),
            },
        )

    def _of_parts(self, run: Run, alike: dict[Rank, Unwrapped], steps: list[int]) -> Finding:
        """Copies that work on one batch together, each with the gradients of its part."""
        reported = self._report(run, alike, Severity.WARNING, steps, steps[1:])
        return msgspec.structs.replace(
            reported,
            confidence=Confidence.SUSPECTED,
            cause="the ranks begin with the same parameters, and each applies gradients of its "
            "own: the all_to_all in forward and backward exchange what the model computes, not the "
            "gradients of its parameters, and between backward and step nothing is exchanged",
            fix="add up the gradients of the ranks' parts before the step: `for p in "
            "model.parameters(): dist.all_reduce(p.grad)` (divided by their number where each rank "
            "takes the mean of its part)",
        )

    def _report(
        self,
        run: Run,
        alike: dict[Rank, Unwrapped],
        severity: Severity,
        common: list[int],
        moved: list[int],
    ) -> Finding:
        rank, event = next(iter(alike.items()))
        kind = event.kind or _loose(len(event.parameters))
        title = f"{event.name} ({kind})" if event.name else kind
        bad = severity is not Severity.NOTE
        late = max(s.late for r, e in alike.items() for s in _states(r, e.optimizer))
        spot = rank.location(event.site) or rank.location(_made(rank, event.optimizer))
        stepped = rank.location(event.step_site)
        steps = max(r.steps_of(e.optimizer) for r, e in alike.items())
        where = models.on_ranks(run, (r.rank for r in alike))
        numbers = 0 if bad else max(_last(r, e).elements for r, e in alike.items())
        beside = "" if bad else other_exchanges.reported(alike, numbers)
        agree = "exchanges its gradients: ranks agree" if beside else "is exchanged: ranks agree"
        return self.finding(
            severity=severity,
            ranks=tuple(r.rank for r in alike),
            steps=Steps(0, max(steps - 1, 0), max(steps, 1)),
            subjects=_names(event),
            optimizers=tuple(sorted({e.optimizer for e in alike.values()})),
            location=stepped if late and stepped else spot or stepped,
            label="before the gradients are exchanged" if late else "never wrapped",
            related=models.related(rank, (("stepped here", event.step_site),) if not late else ()),
            summary=f"{title} is trained {where}, and nothing "
            + ("synchronises its gradients" if bad else agree)
            + (": they differ" if bad and not late else " before it applies them" if bad else ""),
            cause=_cause(kind, event, bad, late, beside),
            fix=_fix(title, event, bad, late, spot),
            fix_kind=FixKind.CHECK,
            evidence={"model": title, **_evidence(rank, event, common, moved, bad)},
            at=rank.wall(event.at),
        )


def _with(first: Finding, others: list[Finding]) -> Finding:
    """Models that one line makes, one after the other, are told together."""
    if not others:
        return first
    numbers = {n for f in (first, *others) for n in f.optimizers}
    named = [f.evidence["model"] for f in (first, *others)]
    apart = len(set(named)) == len(named)
    return msgspec.structs.replace(
        first,
        optimizers=tuple(sorted(numbers)),
        summary=f"{first.summary}; and so with {len(others)} more that this line makes",
        evidence=first.evidence | {"models": named if apart else len(named)},
    )


def _loose(count: int) -> str:
    """Parameters that stand in no module."""
    return "a parameter of no module" if count == 1 else f"a set of {count} parameters"


def _names(event: Unwrapped) -> tuple[str, ...]:
    """Of its parameters; one that stands in no module may have a name in the program."""
    loose = event.name and not event.kind
    return (event.name,) if loose else tuple(p.name for p in event.parameters)


def _alike(run: Run, optimizer: int) -> Iterator[dict[Rank, Unwrapped]]:
    """Ranks that train equal lists of parameters under that number; two at least."""
    kinds: dict[tuple[object, ...], dict[Rank, Unwrapped]] = {}
    for rank in run.ranks.values():
        for event in rank.of(Unwrapped):
            if event.optimizer == optimizer:
                key = tuple((p.shape, p.dtype) for p in event.parameters)
                kinds.setdefault(key, {})[rank] = event
    training = sum(len(k) for k in kinds.values())
    for alike in kinds.values():
        if len(alike) > 1 and len(alike) == training:
            yield alike


def _states(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    """What was seen at its steps. A look before a step that raised proves nothing: what would have
    been exchanged in it was not."""
    found = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
    if rank.exception is None:
        return found
    taken = rank.steps_of(optimizer)
    broken = {s.step for s in found if s.step >= taken and not s.last}
    return [s for s in found if s.step not in broken]


def _exchanged(rank: Rank, event: Unwrapped) -> set[str]:
    """How these parameters were exchanged since the first step, be it under an optimizer that was
    made anew for them (for each round of averaging, say)."""
    model = event.kind, event.parameters
    same = {e.optimizer for e in rank.of(Unwrapped) if (e.kind, e.parameters) == model}
    states = (s for s in rank.of(UnwrappedState) if s.optimizer in same)
    return {s.exchanged for s in states if s.exchanged}


def _shared_beside(rank: Rank, event: Unwrapped) -> bool:
    """Whether the gradients of another optimizer of the same model are exchanged in every step."""
    beside = {
        e.optimizer
        for e in rank.of(Unwrapped)
        if e.root == event.root >= 0 and e.optimizer != event.optimizer
    }
    return any(
        all(s.exchanged == "gradients" and (s.last or s.shared > s.step) for s in states)
        for optimizer in beside
        if (states := _states(rank, optimizer))
    )


def _talk(alike: dict[Rank, Unwrapped]) -> bool:
    """Whether so much is exchanged in the steps that gradients may be among it, be it as objects;
    or something, and no backward makes the gradients (evolution strategies: they come of the
    rewards of all ranks); or DDP averages those of a wrapped model, of which these may be copies.
    """
    for rank, event in alike.items():
        size = sum(prod(p.shape) for p in event.parameters)
        last = _last(rank, event)
        steps = max(1, last.step)
        if last.elements >= ENOUGH * size * steps or last.wrapped >= ENOUGH * steps:
            return True
        often = ENOUGH * max(1, rank.steps_of(event.optimizer))
        if other_exchanges.objects(rank, ENOUGH * size) >= often:
            return True
        taken = (e for e in rank.of(StepDone) if e.optimizer == event.optimizer)
        something = last.elements or other_exchanges.calls(rank) >= often
        if something and not any(e.backwards for e in taken):
            return True
    return False


def _last(rank: Rank, event: Unwrapped) -> UnwrappedState:
    return max(_states(rank, event.optimizer), key=lambda s: s.step)


def _made(rank: Rank, optimizer: int) -> int:
    seen = (o for o in rank.of(OptimizerSeen) if o.optimizer == optimizer)
    return next((o.site for o in seen), -1)


def _cause(kind: str, event: Unwrapped, bad: bool, late: int, beside: str) -> str:
    if not bad:
        also = f", or on {beside} that they exchange beside it" if beside else ""
        return (
            f"{kind} was not given to a wrapper; the ranks hold equal parameters and gradients in "
            f"every step looked at, so they all do the same work on the same data{also}"
        )
    if late:
        return (
            f"the gradients of {kind} are handed to collectives after the step, when every rank "
            "has applied its own"
        )
    beside = " (another model was)" if event.wrapped else ""
    return (
        f"{kind} was given to no wrapper{beside} and its gradients to no collective, so every rank "
        "applies its own"
    )


def _fix(title: str, event: Unwrapped, bad: bool, late: int, spot: Location | None) -> str:
    if not bad:
        return (
            "if each rank is to have its share of the data: shard it, and wrap the model in "
            "DistributedDataParallel"
        )
    if late:
        return "exchange them between `loss.backward()` and `optimizer.step()`"
    if event.wrapped and not event.kind and len(event.parameters) == 1:
        return (
            "make it a parameter of the module that is wrapped, used in its forward, or average it "
            "before the step: `dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
        )
    name = spot.named(event.kind)[0] if spot and event.kind else ""
    wrap = f"`{name} = DistributedDataParallel({name})`" if name else (
        f"wrap {title if event.kind else 'the module that uses them'} in DistributedDataParallel"
    )  # fmt: skip
    return f"{wrap} before the optimizer is built, and train through it"


def _evidence(
    rank: Rank, event: Unwrapped, common: list[int], moved: list[int], bad: bool
) -> Evidence:
    begun = any(s.averaged for s in _states(rank, event.optimizer))
    return {
        "parameters": len(event.parameters),
        "steps compared": common,
        "gradients differ at": common if bad else [],
        "parameters differ at": moved,
        "collectives that carried them": "only before the first step" if begun else 0,
    }
