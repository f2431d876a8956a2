"""DDP305."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import ClassVar

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
from ddpdoctor.analysis.replicas import manual_edits
from ddpdoctor.events import (
    GroupReady,
    OptimizerSeen,
    StepDone,
    TorchLoaded,
    Unwrapped,
    UnwrappedState,
)
from ddpdoctor.report.declarations import NOT_AVERAGED, Effect, When, seen, several_ranks
from ddpdoctor.report.findings import Check, Confidence, Evidence, Finding, FixKind, Severity, Steps
from ddpdoctor.report.merging import merged
from ddpdoctor.run import Location, Rank, Run, counted, ranks_do, ranks_text

GROUP = "gradients of a group"
HOOKS = "in backward"
"""Values of `UnwrappedState.exchanged`: gradients synchronised within a smaller group, and by hooks
in the backward."""

EDITED = (manual_edits.EDIT_ON_SOME, manual_edits.UNEQUAL_EDITS, manual_edits.INEXACT_RESTORE)
"""Rules of other checks: ranks modify parameters or gradients manually."""

ENOUGH = 0.5
"""Numbers exchanged per step and parameter from which on gradients may be among them."""


def _known(run: Run) -> str | None:
    if any(e.late for r in run.ranks.values() for e in r.of(TorchLoaded)):
        return "torch was already in use when the doctor started: earlier wraps are unknown"
    if run.any(Unwrapped):
        return None
    if not run.training_ranks():
        return "no optimizer step seen"
    optimizers = [e for r in run.ranks.values() for e in r.of(OptimizerSeen)]
    held = not optimizers or any(e.models for e in optimizers)
    return None if held else "the optimizers step inside the backward, or on sharded parameters"


class ModelNotWrapped(Check):
    """A model is trained without synchronised gradients

    ## What it finds
    Several ranks of a process group step an optimizer on parameters that are in no wrapper. The
    gradients differ between the ranks when they are applied, so each rank trains its own model.
    Since the first step, no collective carried the gradients; or only after they were applied; or
    only copies of them, whose result is not written back. A broadcast of the parameters before the
    first step makes them equal once; it does not keep them equal.

    Also the parameters that an optimizer's own synchronisation leaves out, or that miss the hooks
    which all-reduce the others; such models beside tensor or sequence parallelism; and ranks
    outside of a group that averages gradients of the same model.

    ## How it knows
    Parameters without a wrapper are listed at an optimizer's first step. Before steps 0, 1, 2, 4, 8
    and so on they and their gradients are digested; for every collective, it is recorded which
    memory it carries, and how much. The digests of a step are compared between the ranks.

    The finding is proven if gradients differ at each of these steps and no collective carried them;
    or, with hooks, if the collectives in the backward carry exactly as many numbers as the equal
    gradients have.

    It is suspected

    - and a note, if the ranks start with different values that no rank broadcast (an ensemble),
      with no wrapped model and no sampler that shards the data
    - beside tensor parallelism, if the parameters were sent over a group before the first step and
      that group exchanges little afterwards (losses)
    - beside all_to_all in forward and backward (sequence parallelism), if all parameters start
      equal, all gradients differ, and nothing is exchanged before a step
    - for ranks that start equal to those that average in a group without them

    ## Why it hurts
    The run looks distributed but is N separate runs, each on its share of the data. The model that
    rank 0 saves has seen 1/N of it.

    ## How to fix it
    `model = DistributedDataParallel(model)` before the optimizer is built, and call that.

    ## When it stays quiet
    - Gradients or parameters are synchronised manually: one by one, in flat buffers, in hooks, in
      the optimizer's step, only in some steps, or as updates.
    - FSDP, tensor parallelism, pipelines; training on one rank only; ranks with different models.
    - Hyperparameter searches: without a sampler that shards the data, the models created on one
      line differ in shape between ranks, or are trained with other options from the first step on.
    - A line makes three or more such models beside a wrapped one (test-time adaptation).
    - A manual synchronisation leaves out some parameters of a model (see `parameter-drift`).
    - Copies of what DDP averages, flat or in another precision.

    Only a note: the ranks stay bit-identical and exchange no gradients (same data, same seed). No
    finding at all if the gradients do not come from a backward and something is exchanged
    (evolution strategies), or if objects large enough to hold the gradients are exchanged in half
    of the steps.
    """

    code = "DDP305"
    name = "model-not-wrapped"
    family = "model"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "never-wrapped": "no collective carries the gradients, and they differ",
        "synced-after-step": "collectives carry the gradients only after the optimizer's step",
        "allreduce-result-unused": "copies of the gradients are all-reduced and not written back",
        "parameters-without-hook": "hooks all-reduce other parameters of the model in the backward",
        "left-out-by-optimizer": "the optimizer's step synchronises other parameters of the model",
        "other-optimizer-synced": "the parameters of another optimizer of the model stay equal",
        "independent-models": "the ranks may be meant to train different models",
        "ranks-outside-group": "other ranks average the gradients of this model in their group",
        "data-parallel-group": "beside model parallelism, a group of replicas averages nothing",
        "sequence-parallel": "the ranks work on parts of one batch, and do not sum their gradients",
        "equal-replicas": "nothing is synchronised, but the ranks stay equal",
    }
    requires = (several_ranks, seen(GroupReady, otherwise="no process group was formed"), _known)
    effects = (
        Effect(NOT_AVERAGED, when=(When.IS_ERROR, When.SAME_OPTIMIZER)),
        # Parameters of other optimizers follow only if all these ranks modify them manually.
        Effect(NOT_AVERAGED, rules=EDITED, when=(When.IS_ERROR, When.SAME_RANKS)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        optimizers = {e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}
        together: dict[object, list[tuple[str, Finding]]] = {}
        for optimizer in sorted(optimizers):
            for replicas in _replicas(run, optimizer):
                event = next(iter(replicas.values()))
                for finding in self._judge(run, optimizer, replicas):
                    place = finding.location or optimizer
                    key = (place, finding.rule, _kind(event), finding.ranks, finding.subjects)
                    together.setdefault(key, []).append((_title(event), finding))
            if found := model_parallel.apart(run, optimizer):
                yield self._of_group(run, found)
            if copies := sequence_parallel.apart(run, optimizer):
                yield self._of_sequence(run, *copies)
        for found_together in together.values():
            yield _with_others(found_together)

    def _judge(
        self, run: Run, optimizer: int, replicas: dict[Rank, Unwrapped]
    ) -> Iterator[Finding]:
        states = {r: {s.step: s for s in _states(r, optimizer)} for r in replicas}
        means = {rank: _exchanged(rank, event) for rank, event in replicas.items()}
        common = sorted(set.intersection(*(set(rows) for rows in states.values())))
        lone = {rank: event for rank, event in replicas.items() if not means[rank]}
        where = models.on_ranks(run, (r.rank for r in replicas))
        if unused_allreduce.found(run, states):
            found = self._report(run, replicas, "allreduce-result-unused", common, common[1:])
            yield unused_allreduce.reported(found, replicas, where)
            return
        if not lone and {m for found in means.values() for m in found} == {HOOKS}:
            found = self._report(run, replicas, "parameters-without-hook", common, common[1:])
            if missed := partly_synced.without_hooks(found, replicas, where):
                yield missed
            return
        if len(lone) < len(replicas):
            others = [rank for rank in replicas if rank not in lone]
            if lone and {m for rank in others for m in means[rank]} == {GROUP}:
                yield from self._outside_group(run, lone, others, states, common)
            return
        differ = [n for n in common if len({rows[n].gradients for rows in states.values()}) > 1]
        moved = [n for n in common if len({rows[n].parameters for rows in states.values()}) > 1]
        if any(n > moved[0] and n not in moved for n in common if moved):
            return  # equal again: synchronised by means that were not seen
        if len(common) > 1 and differ and not moved:
            return  # equal although gradients differ: synchronised in the optimizer's own step
        if (
            common
            and common[0] not in moved
            and all(_synced_beside(r, e) for r, e in replicas.items())
        ):
            return  # `parameter-drift` reports what a manual synchronisation leaves out
        if common and len(differ) == len(common):
            yield from self._differing(run, replicas, common, moved)
        elif len(common) > 1 and not differ and not moved and not _may_synchronise(replicas):
            yield self._report(run, replicas, "equal-replicas", common, moved)

    def _differing(
        self, run: Run, replicas: dict[Rank, Unwrapped], common: list[int], moved: list[int]
    ) -> Iterator[Finding]:
        """The finding where gradients differ at every compared step, and no collective carried them
        before it. What explains this for some of the parameters comes first."""
        if any(s.late for r, e in replicas.items() for s in _states(r, e.optimizer)):
            yield self._report(run, replicas, "synced-after-step", common, moved)
            return
        found = self._report(run, replicas, "never-wrapped", common, moved)
        where = models.on_ranks(run, (r.rank for r in replicas))
        if (part := partly_synced.left_out(found, replicas, where)) is not None:
            yield msgspec.structs.replace(part, rule="left-out-by-optimizer")
        elif (part := partly_synced.named(found, replicas, where)) is not None:
            yield msgspec.structs.replace(part, rule="other-optimizer-synced")
        elif not independent_models.searched(replicas) and not independent_models.adapted(replicas):
            doubted = independent_models.doubted(found, replicas)
            rule = found.rule if doubted is found else "independent-models"
            yield msgspec.structs.replace(doubted, rule=rule)

    def _outside_group(
        self,
        run: Run,
        lone: dict[Rank, Unwrapped],
        others: list[Rank],
        states: dict[Rank, dict[int, UnwrappedState]],
        common: list[int],
    ) -> Iterator[Finding]:
        """Ranks that start with the parameters of the others, but are outside of the group in which
        those average their gradients."""
        moved = [n for n in common if len({rows[n].parameters for rows in states.values()}) > 1]
        if len(common) > 2 and common[0] == 0 and moved == common[1:]:
            found = self._report(run, lone, "ranks-outside-group", common, moved)
            yield msgspec.structs.replace(
                found,
                cause=f"{found.cause}; {ranks_do((r.rank for r in others), 'average')} theirs in a "
                "group of their own",
                fix="create the group with all ranks that train this model, or use the default "
                "group",
            )

    def _of_group(self, run: Run, found: list[model_parallel.ModelParallel]) -> Finding:
        """Replicas within groups, beside model parallelism, that average nothing there."""
        every = [pair for each in found for pair in each.alike.items()]
        replicas = dict(sorted(every, key=lambda pair: pair[0].rank))
        steps = found[0].steps
        reported = self._report(run, replicas, "data-parallel-group", steps, steps[1:])
        groups = [sorted(r.rank for r in each.alike) for each in found]
        ranks = " and ".join(ranks_text(group) for group in groups)
        return msgspec.structs.replace(
            reported,
            cause=f"{ranks} start with the same parameters, which were sent over their group, but "
            "each rank applies its own gradients: afterwards the group exchanges fewer numbers "
            "than the parameters have, and what other groups exchange does not make them equal",
            fix="average the gradients over that group before the step: `dist.all_reduce(p.grad, "
            "group=data_parallel_group)` for every parameter, then divide by the group's size",
            evidence=reported.evidence
            | {
                "groups": [{"ranks": group} for group in groups],
                "numbers exchanged in them since": max(each.exchanged for each in found),
            },
        )

    def _of_sequence(self, run: Run, replicas: dict[Rank, Unwrapped], steps: list[int]) -> Finding:
        """Replicas that work on one batch together, each with the gradients of its part."""
        reported = self._report(run, replicas, "sequence-parallel", steps, steps[1:])
        return msgspec.structs.replace(
            reported,
            cause="the ranks start with the same parameters, but each applies its own gradients: "
            "the all_to_all in forward and backward exchanges activations, not gradients of "
            "parameters, and nothing is exchanged between backward and step",
            fix="sum the gradients of all parts before the step: `for p in model.parameters(): "
            "dist.all_reduce(p.grad)` (divide by the number of ranks if each takes the mean of its "
            "part)",
        )

    def _report(
        self,
        run: Run,
        replicas: dict[Rank, Unwrapped],
        rule: str,
        common: list[int],
        moved: list[int],
    ) -> Finding:
        """The finding of a rule; some rules replace a part of the texts.

        Args:
            replicas: the ranks that train the model.
            rule: one of `rules`.
            common: the steps that were compared.
            moved: those at which parameters differ.
        """
        rank, event = next(iter(replicas.items()))
        equal, late = rule == "equal-replicas", rule == "synced-after-step"
        kind, title = _kind(event), _title(event)
        spot = rank.location(event.site) or rank.location(_made(rank, event.optimizer))
        stepped = rank.location(event.step_site)
        steps = max(r.steps_of(e.optimizer) for r, e in replicas.items())
        where = models.on_ranks(run, (r.rank for r in replicas))
        numbers = max(_last(r, e).elements for r, e in replicas.items()) if equal else 0
        beside = other_exchanges.reported(replicas, numbers) if equal else ""
        return self.finding(
            rule=rule,
            severity=SEVERITIES.get(rule, Severity.ERROR),
            confidence=Confidence.SUSPECTED if rule in SUSPECTED else Confidence.PROVEN,
            ranks=tuple(r.rank for r in replicas),
            steps=Steps(0, max(steps - 1, 0), max(steps, 1)),
            subjects=_names(event),
            optimizers=tuple(sorted({e.optimizer for e in replicas.values()})),
            location=stepped if late and stepped else spot or stepped,
            label="steps before the gradients are synchronised" if late else "never wrapped",
            related=models.related(rank, (("stepped here", event.step_site),) if not late else ()),
            summary=f"{title} is trained {where}, but "
            + (
                f"{'none of its gradients are' if beside else 'nothing is'} exchanged: the ranks "
                "stay equal"
                if equal
                else "its gradients are synchronised only after each rank has applied its own"
                if late
                else "nothing synchronises its gradients, which differ"
            ),
            cause=_cause(kind, event, rule, beside),
            fix=_fix(title, event, rule, spot),
            fix_kind=FixKind.CHECK,
            evidence={"model": title, **_evidence(rank, event, common, moved, equal=equal)},
            at=rank.wall(event.at),
        )


SUSPECTED = ("ranks-outside-group", "data-parallel-group", "sequence-parallel")
"""Rules that judge by what the ranks have in common, not by digests of gradients alone."""

SEVERITIES = {**dict.fromkeys(SUSPECTED, Severity.WARNING), "equal-replicas": Severity.NOTE}
"""Severities other than the check's own."""


def _with_others(found: list[tuple[str, Finding]]) -> Finding:
    """One finding of the models (by title) that one line makes, one after the other."""
    (_, first), *others = found
    if not others:
        return first
    titles = [title for title, _ in found]
    return merged(
        [f for _, f in found],
        note=f"this line makes {counted(len(others), 'more such model')}",
        evidence={"models": titles if len({*titles}) == len(titles) else len(titles)},
    )


def _kind(event: Unwrapped) -> str:
    """The model's class, or words for parameters of no module."""
    count = len(event.parameters)
    loose = "a parameter outside of modules" if count == 1 else f"a set of {count} parameters"
    return event.kind or loose


def _title(event: Unwrapped) -> str:
    """`net (Net)`, where its name is known."""
    return f"{event.name} ({_kind(event)})" if event.name else _kind(event)


def _names(event: Unwrapped) -> tuple[str, ...]:
    """Names of the parameters; one outside of modules may have a name in the program."""
    loose = event.name and not event.kind
    return (event.name,) if loose else tuple(p.name for p in event.parameters)


def _replicas(run: Run, optimizer: int) -> Iterator[dict[Rank, Unwrapped]]:
    """Two or more ranks that train equal lists of parameters with the optimizer of that number, if
    no rank trains another list with it."""
    kinds: dict[tuple[object, ...], dict[Rank, Unwrapped]] = {}
    for rank in run.ranks.values():
        for event in rank.of(Unwrapped):
            if event.optimizer == optimizer:
                key = tuple((p.shape, p.dtype) for p in event.parameters)
                kinds.setdefault(key, {})[rank] = event
    training = sum(len(k) for k in kinds.values())
    for replicas in kinds.values():
        if len(replicas) > 1 and len(replicas) == training:
            yield replicas


def _states(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    """What was examined before the optimizer's steps. A step that raised is left out: what it would
    have exchanged is missing."""
    found = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
    if rank.exception is None:
        return found
    taken = rank.steps_of(optimizer)
    broken = {s.step for s in found if s.step >= taken and not s.last}
    return [s for s in found if s.step not in broken]


def _exchanged(rank: Rank, event: Unwrapped) -> set[str]:
    """How these parameters were exchanged since the first step, also under another optimizer that
    was made for them (for each round of averaging, say): values of `UnwrappedState.exchanged`."""
    model = event.kind, event.parameters
    same = {e.optimizer for e in rank.of(Unwrapped) if (e.kind, e.parameters) == model}
    states = (s for s in rank.of(UnwrappedState) if s.optimizer in same)
    return {s.exchanged for s in states if s.exchanged}


def _synced_beside(rank: Rank, event: Unwrapped) -> bool:
    """Whether the gradients of another optimizer of the same model are synchronised manually in
    every step."""
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


def _may_synchronise(replicas: dict[Rank, Unwrapped]) -> bool:
    """Whether equal gradients may come from communication: enough numbers (or objects) are
    exchanged per step; or anything is, and no backward computes the gradients (evolution strategies
    compute them from the rewards of all ranks); or DDP averages a wrapped model, of which these
    parameters may be copies."""
    for rank, event in replicas.items():
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
    """What was examined before the last examined step."""
    return max(_states(rank, event.optimizer), key=lambda s: s.step)


def _made(rank: Rank, optimizer: int) -> int:
    """Site of the line that made the optimizer, -1 where unknown."""
    seen = (o for o in rank.of(OptimizerSeen) if o.optimizer == optimizer)
    return next((o.site for o in seen), -1)


def _cause(kind: str, event: Unwrapped, rule: str, beside: str) -> str:
    if rule == "equal-replicas":
        also = f", or on {beside} that they exchange otherwise" if beside else ""
        return (
            f"{kind} is not wrapped in DDP; the ranks have equal parameters and gradients in every "
            f"examined step, so they all do the same work on the same data{also}"
        )
    if rule == "synced-after-step":
        return (
            f"the gradients of {kind} are passed to collectives after the step, when each rank has "
            "already applied its own"
        )
    other = " (another model is)" if event.wrapped else ""
    return (
        f"{kind} is not wrapped in DDP{other}, and no collective carries its gradients, so each "
        "rank applies its own"
    )


def _fix(title: str, event: Unwrapped, rule: str, spot: Location | None) -> str:
    if rule == "equal-replicas":
        return (
            "if each rank should train on its share of the data, shard the data and wrap the model "
            "in DistributedDataParallel"
        )
    if rule == "synced-after-step":
        return "all-reduce them between `loss.backward()` and `optimizer.step()`"
    if event.wrapped and not event.kind and len(event.parameters) == 1:
        return (
            "make it a parameter of the wrapped module and use it in its forward, or average its "
            "gradient before the step: `dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
        )
    name = spot.named(event.kind)[0] if spot and event.kind else ""
    wrap = f"`{name} = DistributedDataParallel({name})`" if name else (
        f"wrap {title if event.kind else 'the module that uses them'} in DistributedDataParallel"
    )  # fmt: skip
    return f"{wrap} before the optimizer is built, and train through it"


def _evidence(
    rank: Rank, event: Unwrapped, common: list[int], moved: list[int], *, equal: bool
) -> Evidence:
    begun = any(s.averaged for s in _states(rank, event.optimizer))
    return {
        "parameters": len(event.parameters),
        "steps compared": common,
        "gradients differ at": [] if equal else common,
        "parameters differ at": moved,
        "collectives that carried them": "only before the first step" if begun else 0,
    }
