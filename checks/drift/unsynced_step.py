"""DDP407."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ddpdoctor.analysis.control_flow import uneven_backwards
from ddpdoctor.analysis.divergence.faults import faults
from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.replicas import (
    causes,
    manual_edits,
    state_loading,
    step_in_backward,
    uncompared,
)
from ddpdoctor.analysis.replicas.gradient_patterns import Span, patterns
from ddpdoctor.analysis.replicas.missed_backwards import SYNCED, puts_ahead
from ddpdoctor.analysis.replicas.moving import moved
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import (
    Divergence,
    Replicas,
    divergence,
    each_model,
    needs_copies,
)
from ddpdoctor.events import CommHook, KeptBack, OptimizerSeen, StepDone, SteppedInside, SyncPattern
from ddpdoctor.report.declarations import Condition, Effect, When, seen, unless
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity, Steps
from ddpdoctor.run import Run, counted, some, whom

UNEVEN = uneven_backwards.RULE
STEP_IN_BACKWARD = "step-inside-backward"
NEVER_REDUCED = "fully-shard-never-reduces"
INSIDE_FORWARD = "inside-forward"


@dataclass(frozen=True)
class Reason:
    """Why a backward was not synchronised (`SyncPattern.reason`), and what a report says of it."""

    rule: str
    when: str
    cause: str
    fix: str
    label: str


ONE_CONDITION = (
    "enter `no_sync()` only where no `optimizer.step()` follows: compute that condition once, and "
    "use it for both"
)
REASONS = {
    "no_sync": Reason(
        "no-sync",
        "the last backward before the step runs under `no_sync()`, or with DDP's flag off",
        "synchronisation was switched off for the last backward before the step, so each rank kept "
        "its own gradients",
        f"synchronise the last micro-batch before the step: {ONE_CONDITION}",
        "gradient sync is off for the last micro-batch before the step",
    ),
    "forward only": Reason(
        "forward-only",
        "synchronisation is off during the forward, and on again in backward",
        "synchronisation was off during the forward and on again in backward; DDP decides in the "
        "forward",
        "run the forward of the last micro-batch before the step outside `no_sync()` as well",
        "covers the forward only",
    ),
    "second backward": Reason(
        "second-backward",
        "a second backward over one forward adds gradients that DDP does not average",
        "DDP averages in the first backward after a forward; this one came later and added each "
        "rank's own gradients",
        "add the losses and call backward once, or run another forward for the second one",
        "not averaged: DDP has finished with this forward",
    ),
    "no forward": Reason(
        "no-forward",
        "a backward without a forward of the wrapper since the last step",
        "DDP averages in the first backward after a forward of the wrapper; there was none since "
        "the last step, so this backward added each rank's own gradients",
        "run the forward through the wrapper (`ddp(x)`, not the inner module) before this "
        "backward, on every rank, also for an empty or dummy batch",
        "not averaged: no forward of the wrapper before it",
    ),
    "inside forward": Reason(
        INSIDE_FORWARD,
        "backward runs inside the wrapper's forward",
        "this backward runs inside the forward of DistributedDataParallel, which prepares its "
        "reducer for a backward only when the forward returns",
        "return the loss from forward and call backward after it; in Lightning with "
        "`automatic_optimization = False` call `self.manual_backward(loss)` instead of "
        "`loss.backward()`",
        "not averaged: DDP is still in its forward",
    ),
    "autograd.grad": Reason(
        "autograd-grad",
        "gradients come from `torch.autograd.grad`, which bypasses DDP",
        "`torch.autograd.grad` returns gradients without DDP's hooks; the program wrote them to "
        "`.grad`",
        "use `loss.backward()`, or average the gradients with `dist.all_reduce`",
        "bypasses DDP",
    ),
    "not reduced": Reason(
        "not-reduced",
        "a backward that should have synchronised communicated nothing",
        "this backward should have averaged the gradients, but communicated nothing",
        "call the wrapper, not `model.module`, and wrap again after changing the model",
        "communicates nothing",
    ),
}
HOOK = Reason(
    "communication-hook",
    "the model's communication hook communicates nothing",
    "the model's communication hook `{hook}` communicated nothing in these backwards: it returned "
    "each rank's own gradients",
    "let the hook start a collective for each bucket; if ranks are to continue alone for some "
    "steps, average the parameters after them (`torch.distributed.algorithms.model_averaging`)",
    "averages in place of DDP",
)
LEFT_OVER = Reason(
    "left-over-group",
    "the last, incomplete group of micro-batches is not synchronised",
    "the left-over group of {left} is never synchronised: the other groups have {full}, and only a "
    "full group ends with a backward outside `no_sync()`",
    f"synchronise on the last batch of the epoch as well: {ONE_CONDITION}",
    "off for all micro-batches of this step",
)
TAKE_OUT = (
    "remove this `no_sync()`: it is around the {} backward before the step, the one that has to "
    "synchronise"
)
"""What torch raises in a later step if DDP was not prepared for a backward that ran."""
FLAG = "require_backward_grad_sync"
FLAG_FIXES = {
    "no_sync": f"set `{FLAG} = True` before the forward of the last micro-batch before the step",
    "forward only": f"set `{FLAG}` before the forward: DDP reads it when the forward ends",
}
ANOTHER = f"another backward synchronises, not the one before the step: {ONE_CONDITION}"
ENOUGH = 0.5
"""Elements communicated per element of the gradients from which on they may be the gradients."""

STEPS_AT_LEAST = 4
"""Consecutive steps that apply nothing; a loop may call `step` after each micro-batch."""


class UnsyncedStep(Check):
    """The optimizer steps with gradients that were not averaged

    ## What it finds
    Steps whose last backward left each rank with its own gradients: the stepping micro-batch under
    `no_sync`, synchronisation switched between forward and backward, a second backward over one
    forward, a backward inside the wrapper's forward, gradients from `torch.autograd.grad`, a
    communication hook that communicates nothing. Also hooks on parameters
    (`register_post_accumulate_grad_hook`) that step inside backward, before DDP averages, and
    `fully_shard` models whose gradients are never reduced, so that steps apply nothing. And steps
    before which ranks run different numbers of backwards that all communicate (`fully_shard`, an
    all-reduce of the program after each micro-batch): what they average is of different steps.

    ## How it knows
    In every backward each rank compares the process group's count of collectives before and after;
    with DDP's flag at the end of the forward, this tells before every step whether the last
    backward was synchronised. For `fully_shard` it records whether the optimizer ever finds a
    gradient. It also records what the program itself passes to collectives, and compares digests
    (checksums) of gradients that were not averaged, as `gradient-drift` does. For a step inside
    backward the count since the start of backward decides, and the parameters are compared before
    the next one. The fault is proven if gradients differ between ranks, or if nothing was
    communicated that may have been gradients. For uneven backwards each rank counts those before
    each step and its calls in the group: the fault is proven where the ranks' calls were even up to
    one step and those that some made more are exactly those of the backwards that they ran more,
    since calls are matched by their number. It is an unsynchronised step, as what the step applies
    is not the average of the same step on all ranks. Where the run hangs later, this is the cause
    of `collective-mismatch` instead.

    ## Why it hurts
    Every rank takes a step of its own. The models diverge and nothing raises; the checkpoint is
    that of rank 0, trained on its share of the data.

    ## How to fix it
    Make the last backward before `optimizer.step()` a synchronising one: forward and backward
    outside `no_sync()`, one backward per forward.

    ## When it stays quiet
    - Micro-batches before the last one.
    - A backward inside the wrapper's forward that communicates all the same (Lightning's
      `manual_backward`, which prepares DDP's reducer itself).
    - Gradients that the program averages itself, or that are equal on all ranks after enough was
      communicated to make them so.
    - Optimizers that communicate what they apply, so that parameters move and stay equal.
    - Local SGD, where the parameters are averaged instead.
    - Ranks with different numbers of micro-batches of which only the last one communicates, steps
      that a rank has not finished, and optimizers that take turns in another order.
    """

    code = "DDP407"
    name = "unsynced-step"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **{reason.rule: reason.when for reason in (*REASONS.values(), HOOK, LEFT_OVER)},
        STEP_IN_BACKWARD: "a hook steps inside backward, before DDP has averaged",
        UNEVEN: uneven_backwards.TEXT,
        NEVER_REDUCED: "`fully_shard` never reduces the gradients, and steps apply nothing",
    }
    requires = tuple(
        uneven_backwards.unless_compared(unless(requirement, KeptBack, SteppedInside))
        for requirement in (
            needs_copies,
            seen(SyncPattern, otherwise="no optimizer step after DDP's backward was seen"),
        )
    )
    effects = (
        Effect(
            ("collective-mismatch", "rank-exited-early"),
            when=(Condition("of ranks ahead by the backwards that they missed", puts_ahead),),
        ),
        # The calls that some made more are answered by nobody in the end.
        Effect(
            ("rank-exited-early",),
            of=(UNEVEN,),
            rules=("loop-exit", "skipped-round", "early-return"),
            when=(When.SINCE, When.STEP_NOT_BEFORE),
        ),
        Effect(("stall",), of=(UNEVEN,), when=(When.SINCE, When.STEP_NOT_BEFORE)),
        Effect(("first-failure",), of=(INSIDE_FORWARD,), errors=(ErrorKind.REDUCER_UNPREPARED,)),
        Effect(
            (
                "gradient-drift",
                "buffer-drift",
                "optimizer-state-drift",
                "grad-scaler-skew",
                "model-not-wrapped",
            ),
            when=(When.STEP_NOT_BEFORE,),
        ),
        # Applied in the step, and seen before the next one.
        Effect(("parameter-drift",), when=(When.STEP_AFTER,)),
        # An optimizer that steps in a forward does so before the step that ends it.
        Effect(("parameter-drift",), of=(INSIDE_FORWARD,), when=(When.STEP_NOT_BEFORE,)),
    )

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge)
        for optimizer in sorted({e.optimizer for r in run.ranks.values() for e in r.of(KeptBack)}):
            yield from self._never_reduced(run, optimizer)
        for model in step_in_backward.stepped(run):
            yield self._stepped_inside(run, model)
        if not any(fault.why.rule == UNEVEN for fault in faults(run, "collective-mismatch")):
            for uneven in uneven_backwards.uneven_backwards(run)[:1]:
                yield self.finding(**uneven.fields)

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            return
        bad = {
            n: spans
            for n, m in group.members.items()
            if (spans := [s for s in patterns(m) if s.pattern.reason])
        }
        if not bad:
            return
        differ = divergence(group, "local")
        if not _proven(group, bad, differ):
            return
        number, spans = next(iter(bad.items()))
        member, pattern = group.members[number], spans[0].pattern
        rank = member.rank
        full = _full_group(member, spans)
        count = sum(s.count for s in spans)
        total = max(s.last for m in group.members.values() for s in patterns(m)) + 1
        steps, in_part = Steps(spans[0].first, spans[-1].last, count), ""
        spot = rank.location(pattern.site)
        hook = _hook(member, pattern)
        if hook is not None:
            spot = rank.location(hook.site) or spot
            name = hook.name.removeprefix("__main__.")
            reason = replace(HOOK, cause=HOOK.cause.format(hook=name))
            if (part := _part(group)) is not None:
                steps = Steps(
                    min(steps.first, part.first), max(steps.last, part.keys[-1]),
                    count + len(part.keys),
                )  # fmt: skip
                names = some(part.names)
                in_part = f" (in {len(part.keys)} of the others only those of {names})"
                more = f"; in other steps it returned different gradients of {names} on each rank"
                reason = replace(reason, cause=reason.cause + more)
        elif full:
            left = counted(pattern.unsynced, "micro-batch", "micro-batches")
            reason = replace(LEFT_OVER, cause=LEFT_OVER.cause.format(left=left, full=full))
        else:
            reason = _reason(member, spans, sets_flag=spot is not None and FLAG in spot.source)
        second = pattern.reason in (
            "second backward",
            "no forward",
        )  # it may be over an earlier forward
        places = [
            ("last forward before it" if second else "its forward", pattern.forward_site),
            ("its backward", pattern.backward_site),
        ]
        if full:
            after = _step_site(member, spans[0].first)
            places.append(("steps with the left-over micro-batches", after))
        yield self.finding(
            ranks=tuple(sorted(bad)),
            steps=steps,
            subjects=(group.any.wrapped.kind,),
            location=spot or rank.location(pattern.backward_site),
            label=reason.label,
            related=models.related(rank, places),
            summary="optimizer.step applies rank-local gradients on "
            f"{whom(bad, run.world_size)} in {count} of {total} steps{in_part}, first at step "
            f"{steps.first}",
            cause=reason.cause,
            fix=reason.fix,
            rule=reason.rule,
            evidence={
                **_backwards(pattern),
                "collectives_from_backward_to_step": _carried(pattern),
                **_difference(group, differ),
            },
            at=rank.wall(pattern.at),
        )

    def _stepped_inside(self, run: Run, model: step_in_backward.Inside) -> Finding:
        rank, event = next(iter(model.last.items()))
        count = max(e.count for e in model.last.values())
        ranks = {r.rank for r in model.last}
        return self.finding(
            rule=STEP_IN_BACKWARD,
            confidence=Confidence.PROVEN if model.differ else Confidence.SUSPECTED,
            ranks=tuple(sorted(ranks)),
            steps=Steps(event.first, event.first + count - 1, count),
            subjects=(model.wrapped.kind,),
            location=rank.location(event.site) or rank.location(event.backward_site),
            label="steps inside backward, before DDP averages",
            related=models.related(rank, [("the backward", event.backward_site)]),
            summary=f"optimizer.step applies rank-local gradients on {whom(ranks, run.world_size)} "
            f"inside {count} of {event.backwards} backwards of {model.wrapped.kind}",
            cause="a hook steps as soon as a gradient is computed, before DDP averages it: each "
            "rank applies its own",
            fix="step after `loss.backward()`, when DDP has averaged the gradients",
            evidence={
                "collectives_from_backward_to_step": "none",
                "parameters_compared_after": model.compared,
                "parameters_differ_after": model.differ,
            },
            at=rank.wall(event.at),
        )

    def _never_reduced(self, run: Run, optimizer: int) -> Iterator[Finding]:
        """Gradients of `fully_shard` that are never reduced: the steps apply nothing."""
        reported = {
            r: [e for e in r.of(KeptBack) if e.optimizer == optimizer] for r in run.training_ranks()
        }
        steps = min((r.steps_of(optimizer) for r in reported), default=0)
        if steps < STEPS_AT_LEAST or any(
            not e or any(k.applied for k in e) for e in reported.values()
        ):
            return
        rank, (event, *_) = next(iter(reported.items()))
        made = next((o for o in rank.of(OptimizerSeen) if o.optimizer == optimizer), None)
        kind = made.kind if made else "the optimizer"
        yield self.finding(
            rule=NEVER_REDUCED,
            ranks=tuple(r.rank for r in reported),
            steps=Steps(event.step, steps - 1, steps - event.step),
            subjects=(kind,),
            location=rank.location(event.site),
            label="finds no gradient to apply",
            summary=f"none of the {steps} steps of {kind} had a gradient to apply: `fully_shard` "
            f"never reduced the gradients of its {event.parameters} parameters",
            cause="gradient synchronisation was off in every backward "
            "(`set_requires_gradient_sync(False)`): each rank accumulates unsharded gradients, and "
            "the sharded parameters, which the optimizer holds, get none",
            fix="switch it on for the last backward before each step: "
            "`model.set_requires_gradient_sync(i == accumulation - 1)` with `i` from 0",
            evidence={"steps": steps, "sharded_parameters": event.parameters},
            at=rank.wall(event.at),
        )


def _full_group(member: Member, spans: list[Span]) -> int:
    """How many micro-batches a synchronised step has, where the steps that are not synchronised
    stand alone and have fewer: the rest of an epoch. 0 where it is not so."""
    full = [s for s in patterns(member) if not s.pattern.reason and s.pattern.synced]
    often: Counter[int] = Counter()
    for span in full:
        often[span.pattern.synced + span.pattern.unsynced] += span.count
    size = max(often, key=lambda n: (often[n], n), default=0)
    left_over = all(
        s.pattern.reason == "no_sync"
        and not s.pattern.synced
        and s.pattern.unsynced < size
        and s.count == 1
        for s in spans
    )
    return size if left_over else 0


def _hook(member: Member, pattern: SyncPattern) -> CommHook | None:
    """The communication hook that did not average, unless it is one of torch's that do."""
    mine = [h for h in member.rank.of(CommHook) if h.model == member.model and h.at <= pattern.at]
    lacking = pattern.reason == "not reduced" and not member.seen.averages
    return mine[-1] if mine and lacking else None


def _part(group: Replicas) -> Divergence | None:
    """Where gradients differ after backwards in which the hook did communicate, unless the program
    modifies them afterwards, or averages the parameters."""
    found = divergence(group, "gradients")
    parameters = divergence(group, "parameters")
    if found is None or (parameters is not None and parameters.healed >= 0):
        return None
    return None if manual_edits.edited(group, "gradients", found) else found


def _reason(member: Member, spans: list[Span], *, sets_flag: bool) -> Reason:
    """The reason of the first span, with the fix for it. A backward under `no_sync` need not be one
    of several micro-batches: it may be the only one of its step, or always the last one, after
    another one at another line."""
    first = spans[0].pattern.reason
    reason = REASONS[first]
    if sets_flag:
        late = first == "forward only"
        return replace(
            reason,
            fix=FLAG_FIXES.get(first, reason.fix),
            label="set after the forward" if late else reason.label,
        )
    if any(s.pattern.reason != "no_sync" for s in spans):
        return reason
    every = [s.pattern for s in patterns(member)]
    if all(p.synced + p.unsynced <= 1 for p in every):
        return replace(reason, fix=TAKE_OUT.format("only"))
    separate = (p.synced == p.once == p.unsynced == 1 and p.line != p.backward_site for p in every)
    if len(every) == len(spans) and all(separate):
        return replace(reason, fix=TAKE_OUT.format("last"))
    another = [p.synced == 1 < p.unsynced and p.line == p.backward_site for p in every]
    return replace(reason, fix=ANOTHER) if sum(another) > len(another) / 2 else reason


def _step_site(member: Member, step: int) -> int:
    """Site of the line of one step; -1 where it is not known."""
    steps = (e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer)
    return next((e.site for e in steps if e.step - e.count < step <= e.step), -1)


def _backwards(pattern: SyncPattern) -> dict[str, int]:
    """How many backwards contributed to the gradients, by kind; empty where it is not known."""
    if not pattern.synced + pattern.unsynced and pattern.reason != "autograd.grad":
        return {}
    return {
        SYNCED: pattern.synced,
        "rank_local_backwards_before_the_step": pattern.unsynced,
    }


def _proven(group: Replicas, bad: dict[int, list[Span]], differ: Divergence | None) -> bool:
    """Whether nothing else makes up for it: gradients averaged in another way, an optimizer that
    averages what it applies, or local SGD."""
    parameters = divergence(group, "parameters")
    if parameters and parameters.healed >= 0:
        return state_loading.reloads(group, "weights", parameters.at)
    if differ is not None:
        return parameters is not None or not moved(group, differ)
    reported = [s.pattern for spans in bad.values() for s in spans]
    return not any(p.talked or p.carried >= ENOUGH * group.size for p in reported)


def _carried(pattern: SyncPattern) -> str:
    if pattern.carried:
        return f"of {pattern.carried} elements"
    return "some" if pattern.talked else "none"


def _difference(group: Replicas, differ: Divergence | None) -> dict[str, object]:
    if differ is None:
        return {"gradients": "not seen to differ (the same data on all ranks, or not compared)"}
    return causes.evidence(group, differ)
