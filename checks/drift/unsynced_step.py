"""DDP407."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpdoctor.analysis.replicas import (
    causes,
    manual_edits,
    state_loading,
    step_in_backward,
    uncompared,
)
from ddpdoctor.analysis.replicas.gradient_patterns import Span, patterns
from ddpdoctor.analysis.replicas.missed_backwards import parts_them
from ddpdoctor.analysis.replicas.moving import moved
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    divergence,
    each_model,
    replicas,
)
from ddpdoctor.events import CommHook, KeptBack, OptimizerSeen, StepDone, SteppedInside, SyncPattern
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Rank, Run, ranks_text, some

CAUSES = {
    "no_sync": "synchronisation was switched off for the last backward before the step, so that "
    "backward kept its gradients to itself",
    "forward only": "synchronisation was off during the forward and on again at the backward; DDP "
    "decides in the forward",
    "second backward": "DDP averages in the first backward after a forward; this one came after "
    "that and added each rank's own gradients",
    "inside forward": "this backward runs inside the forward of DistributedDataParallel, which "
    "prepares its reducer for a backward only when the forward returns",
    "autograd.grad": "`torch.autograd.grad` returns gradients without telling DDP; they were "
    "written to `.grad` by hand",
    "not reduced": "the backward should have averaged the gradients and did not communicate",
}
FIXES = {
    "no_sync": "synchronise the micro-batch that steps: enter `no_sync()` only while "
    "`(i + 1) % accumulation != 0`",
    "forward only": "run the forward of the micro-batch that steps outside `no_sync()`, too",
    "second backward": "add the losses and call backward once, or run another forward for the "
    "second one",
    "inside forward": "return the loss from forward and call backward after it; in Lightning with "
    "`automatic_optimization = False` call `self.manual_backward(loss)` in place of "
    "`loss.backward()`",
    "autograd.grad": "use `loss.backward()`, or average the gradients with `dist.all_reduce`",
    "not reduced": "call the wrapper, not `model.module`, and wrap again after changing the model",
}
LAST_BATCH = (
    "synchronise on the last batch of the epoch, too: enter `no_sync()` unless "
    "`(i + 1) % accumulation == 0 or i + 1 == len(loader)`"
)
TAKE_OUT = (
    "take this `no_sync()` out: it is around the {} backward before the step, the one that has to "
    "synchronise"
)
IN_HOOK = (
    "have the hook start a collective for each bucket it is given; where ranks are to go on alone "
    "for some steps, average the parameters after them (`torch.distributed.algorithms."
    "model_averaging`)"
)
REDUCER_CONFUSED = ("`initialize_buckets` must NOT be called", "still allreduced by DDP reducer")
"""What torch raises in a later step, where DDP was not prepared for a backward that ran."""

FLAG = "require_backward_grad_sync"
BY_HAND = {
    "no_sync": f"set `{FLAG} = True` before the forward of the micro-batch that steps",
    "forward only": f"set `{FLAG}` before the forward: DDP reads it when that ends",
}
ANOTHER = (
    "step right after the backward that synchronises: another one of each step does, so let "
    "`no_sync()` and `optimizer.step()` follow the same condition"
)
ENOUGH = 0.5
"""Numbers exchanged per number of a gradient that may be the gradients."""

STEPS_AT_LEAST = 4
"""In a row that apply nothing; a loop may call `step` at each micro-batch."""

LABELS = {
    "no_sync": "still off for the micro-batch that steps",
    "forward only": "covers the forward only",
    "second backward": "not averaged: DDP is done with this forward",
    "inside forward": "not averaged: DDP is still in its forward",
    "autograd.grad": "DDP never sees these gradients",
    "not reduced": "communicates nothing",
}


class UnsyncedStep(Check):
    """The optimizer steps with gradients that were not averaged

    ## What it finds
    Steps whose last backward kept each rank's gradients to itself: the stepping micro-batch left
    under `no_sync`, synchronisation switched between forward and backward, a second backward over
    one forward, a backward inside the wrapper's forward, gradients from `torch.autograd.grad`, a
    communication hook that has nothing sent; hooks on parameters
    (`register_post_accumulate_grad_hook`) that step inside the backward, before DDP averages; also
    `fully_shard` that never reduces any, so that the steps apply nothing.

    ## How it knows
    In every backward the process group's own count of collectives is compared before and after;
    with DDP's flag at the end of the forward it tells, before every step, whether the last backward
    averaged. Of `fully_shard` it is looked at whether an optimizer ever finds a gradient. What the
    program itself hands to collectives is noted, and gradients that were not averaged are digested
    and compared as for `gradient-drift`. At a step inside the backward it is that count since the
    backward began; the parameters are digested before the next one. The finding is proven: they
    differ between the ranks, or nothing was exchanged that may have been gradients.

    ## Why it hurts
    Every rank takes a step of its own. The models drift apart and nothing raises; the checkpoint
    is that of rank 0, trained on its share of the data.

    ## How to fix it
    Make the last backward before `optimizer.step()` a synchronising one: forward and backward
    outside `no_sync()`, one backward per forward.

    ## When it stays quiet
    Micro-batches before the last one; a backward inside the wrapper's forward that communicates
    all the same (Lightning's `manual_backward`, which prepares DDP's reducer itself); gradients
    that are averaged by hand, or equal on all ranks after as much as they are was exchanged;
    optimizers that exchange what they apply, so that the parameters move and stay equal; local
    SGD, where the parameters are averaged instead.
    """

    code = "DDP407"
    name = "unsynced-step"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        if run.any(KeptBack) or run.any(SteppedInside):
            return None
        if not replicas(run):
            return NO_COPIES
        return (
            None if run.any(SyncPattern) else "no backward through a wrapper before a step was seen"
        )

    def left_out(self, run: Run) -> str | None:
        return uncompared.left_out(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge)
        for optimizer in sorted({e.optimizer for r in run.ranks.values() for e in r.of(KeptBack)}):
            yield from self._never_reduced(run, optimizer)
        for model in step_in_backward.stepped(run):
            yield self._stepped_inside(run, model)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if parts_them(mine, other):
            return True
        if other.check == "first-failure":
            said = str(other.evidence)
            return mine.rule == "inside-forward" and any(text in said for text in REDUCER_CONFUSED)
        later = (
            "gradient-drift", "parameter-drift", "buffer-drift", "optimizer-state-drift",
            "grad-scaler-skew", "model-not-wrapped",
        )  # fmt: skip
        if other.check not in later or mine.steps is None:
            return False
        applied = other.check == "parameter-drift"  # by the step, and seen before the next one
        return other.steps is None or other.steps.first >= mine.steps.first + applied

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
        reason = pattern.reason
        rule = "-".join(reason.replace(".", " ").replace("_", " ").split())
        steps, in_part = Steps(spans[0].first, spans[-1].last, count), ""
        spot = rank.location(pattern.site)
        by_hand = spot is not None and FLAG in spot.source
        if (hook := _hook(member, pattern)) is not None:
            spot = rank.location(hook.site) or spot
            rule, label, fix = "communication-hook", "averages in DDP's place", IN_HOOK
            cause = (
                f"the model's communication hook `{hook.name.removeprefix('__main__.')}` had "
                "nothing sent in these backwards: what it gives back are each rank's own gradients"
            )
            if (part := _part(group)) is not None:
                steps = Steps(
                    min(steps.first, part.first), max(steps.last, part.keys[-1]),
                    count + len(part.keys),
                )  # fmt: skip
                names = some(part.names)
                in_part = f", and in {len(part.keys)} of the others those of {names}"
                cause += f"; in the others it gives back unlike gradients of {names}"
        elif full:
            rule = "left-over-group"
            label, fix = "off for all micro-batches of this step", LAST_BATCH
            cause = _left_over(pattern.unsynced, full)
        else:
            label, fix = _label(reason, by_hand), _fix(member, spans, by_hand)
            cause = CAUSES[reason]
        yield self.finding(
            ranks=tuple(sorted(bad)),
            steps=steps,
            subjects=(group.any.wrapped.kind,),
            location=spot or rank.location(pattern.backward_site),
            label=label,
            related=_related(rank, pattern) + (_stepped(member, spans[0].first) if full else ()),
            summary=f"rank-local gradients reach optimizer.step on "
            f"{_who(bad, run)}, in {count} of {total} steps{in_part}, first at step {steps.first}",
            cause=cause,
            fix=fix,
            fix_kind=FixKind.CHECK,
            rule=rule,
            evidence={
                "backwards_before_the_step": _backwards(pattern),
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
            confidence=Confidence.PROVEN if model.differ else Confidence.SUSPECTED,
            ranks=tuple(sorted(ranks)),
            steps=Steps(event.first, event.first + count - 1, count),
            subjects=(model.wrapped.kind,),
            location=rank.location(event.site) or rank.location(event.backward_site),
            label="steps inside the backward, before DDP averages",
            related=_places(rank, (("the backward", event.backward_site),)),
            summary=f"rank-local gradients reach optimizer.step on "
            f"{'all ranks' if len(ranks) == run.world_size else ranks_text(ranks)}, in {count} of "
            f"{event.backwards} backwards of {model.wrapped.kind}: it is stepped inside of them",
            cause="a hook steps as soon as a gradient is there, and DDP averages it only after "
            "that: each rank applies its own",
            fix="step after `loss.backward()`, when DDP has averaged the gradients",
            fix_kind=FixKind.CHECK,
            evidence={
                "collectives_from_backward_to_step": "none",
                "parameters_compared_after": model.compared,
                "parameters_differ_after": model.differ,
            },
            at=rank.wall(event.at),
        )

    def _never_reduced(self, run: Run, optimizer: int) -> Iterator[Finding]:
        """Under `fully_shard` the steps apply nothing then."""
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
            ranks=tuple(r.rank for r in reported),
            steps=Steps(event.step, steps - 1, steps - event.step),
            subjects=(kind,),
            location=rank.location(event.site),
            label="finds no gradient to apply",
            summary=f"none of the {steps} steps of {kind} had a gradient to apply: `fully_shard` "
            f"reduced no gradient of its {event.parameters} parameters",
            cause="synchronisation was switched off at every backward "
            "(`set_requires_gradient_sync(False)`): each rank keeps whole gradients to itself and "
            "adds to them, and the sharded parameters, which the optimizer holds, get none",
            fix="switch it on for the last backward before each step: "
            "`model.set_requires_gradient_sync(i == accumulation - 1)` with `i` from 0",
            fix_kind=FixKind.CHECK,
            evidence={"steps": steps, "sharded parameters": event.parameters},
            at=rank.wall(event.at),
        )


def _who(bad: dict[int, list[Span]], run: Run) -> str:
    return "all ranks" if len(bad) == run.world_size else ranks_text(bad)


def _full_group(member: Member, spans: list[Span]) -> int:
    """Micro-batches of the steps that do synchronise, where those that do not stand alone and are
    of fewer: what an epoch leaves over; 0 where it is not so."""
    full = [s.pattern for s in patterns(member) if not s.pattern.reason and s.pattern.synced]
    size = min((p.synced + p.unsynced for p in full), default=0)
    left_over = all(
        s.pattern.reason == "no_sync"
        and not s.pattern.synced
        and s.pattern.unsynced < size
        and s.count == 1
        for s in spans
    )
    return size if left_over else 0


def _hook(member: Member, pattern: SyncPattern) -> CommHook | None:
    """What averages in DDP's place and did not, unless it is one of torch's that do."""
    mine = [h for h in member.rank.of(CommHook) if h.model == member.model and h.at <= pattern.at]
    lacking = pattern.reason == "not reduced" and not member.seen.averages
    return mine[-1] if mine and lacking else None


def _part(group: Replicas) -> Divergence | None:
    """Where gradients differ after backwards in which the hook did send something, unless they are
    edited after it, or the parameters are averaged."""
    found = divergence(group, "gradients")
    parameters = divergence(group, "parameters")
    if found is None or (parameters is not None and parameters.healed >= 0):
        return None
    return None if manual_edits.edited(group, "gradients", found) else found


def _label(reason: str, by_hand: bool) -> str:
    return "set after the forward" if by_hand and reason == "forward only" else LABELS[reason]


def _fix(member: Member, spans: list[Span], by_hand: bool) -> str:
    """What to do about a backward that is no micro-batch of several is another thing: the only one
    of its step, or always the last one, after another one at another line."""
    if by_hand:
        return BY_HAND.get(spans[0].pattern.reason, FIXES[spans[0].pattern.reason])
    every = [s.pattern for s in patterns(member)]
    if any(s.pattern.reason != "no_sync" for s in spans):
        return FIXES[spans[0].pattern.reason]
    if all(p.synced + p.unsynced <= 1 for p in every):
        return TAKE_OUT.format("only")
    apart = (p.synced == p.once == p.unsynced == 1 and p.line != p.backward_site for p in every)
    last = len(every) == len(spans) and all(apart)
    if last:
        return TAKE_OUT.format("last")
    another = [p.synced == 1 < p.unsynced and p.line == p.backward_site for p in every]
    return ANOTHER if sum(another) > len(another) / 2 else FIXES["no_sync"]


def _left_over(count: int, full: int) -> str:
    group = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return (
        f"the left-over group of {group} is never synchronised: the others are of {full}, and "
        "only a full one ends with a backward outside `no_sync()`"
    )


def _stepped(member: Member, step: int) -> tuple[Related, ...]:
    """The line of one step."""
    for done in member.rank.of(StepDone):
        if done.optimizer == member.optimizer and done.step - done.count < step <= done.step:
            spot = member.rank.location(done.site)
            return (Related("steps with what is left over", spot),) if spot else ()
    return ()


def _backwards(pattern: SyncPattern) -> str:
    by_hand = pattern.reason == "autograd.grad"
    if not pattern.synced + pattern.unsynced:
        return "none, the gradients were taken by `torch.autograd.grad`" if by_hand else ""
    last = "then `torch.autograd.grad`" if by_hand else "the last one not"
    return f"{pattern.synced} averaged, {pattern.unsynced} not, {last}"


def _proven(group: Replicas, bad: dict[int, list[Span]], differ: Divergence | None) -> bool:
    """Silent for gradients that were averaged in another way, for optimizers that average what
    they apply, and for local SGD."""
    parameters = divergence(group, "parameters")
    if parameters and parameters.healed >= 0:
        return state_loading.reloads(group, "weights", parameters.at)
    if differ is not None:
        return parameters is not None or not moved(group, differ)
    reported = [s.pattern for spans in bad.values() for s in spans]
    return not any(p.talked or p.carried >= ENOUGH * group.size for p in reported)


def _carried(pattern: SyncPattern) -> str:
    if pattern.carried:
        return f"of {pattern.carried} numbers"
    return "some" if pattern.talked else "none"


def _difference(group: Replicas, differ: Divergence | None) -> dict[str, object]:
    if differ is None:
        return {"gradients": "not seen to differ: all ranks had the same data, or were not sampled"}
    return causes.evidence(group, differ)


def _related(rank: Rank, pattern: SyncPattern) -> tuple[Related, ...]:
    """A second backward may be one over an earlier forward than the last."""
    second = pattern.reason == "second backward"
    forward = "the last forward before it" if second else "its forward"
    return _places(rank, ((forward, pattern.forward_site), ("its backward", pattern.backward_site)))


def _places(rank: Rank, places: Iterable[tuple[str, int]]) -> tuple[Related, ...]:
    spots: list[tuple[str, Location | None]] = [(t, rank.location(s)) for t, s in places]
    return tuple(Related(text, spot) for text, spot in spots if spot)
