"""DDP404."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from ddpdoctor.analysis.meshes.shard_states import SameStates, same_states
from ddpdoctor.analysis.replicas import (
    causes,
    manual_edits,
    skipped_steps,
    state_loading,
    uneven_epochs,
)
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.moving import kept_by_one
from ddpdoctor.analysis.replicas.replica import Member
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    divergence,
    each_model,
    kinds,
    replicas,
)
from ddpdoctor.analysis.replicas.uncompared import uncompared
from ddpdoctor.events import Hyperparameters, OptimizerSeen, Replica, ShardStates, StepDone
from ddpdoctor.report.declarations import Condition, Effect
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, counted, listed, ranks_do, some

OF_GRADIENTS = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev",
}  # fmt: skip
"""State of torch's optimizers that is computed from gradients alone, without weight decay."""


STATE_CHANGED = "state-changed"
NEW_OPTIMIZER = "new-optimizer"
OTHER_SHARD = "state-of-another-shard"


def _applied(mine: Finding, other: Finding) -> bool:
    if other.rule == skipped_steps.SKIPPED or not causes.changed_state(mine):
        return False
    # What was loaded applies with the next step, what was modified perhaps at once.
    return causes.may_follow(other, mine, mine.rule in state_loading.RULES)


class OptimizerStateDrift(Check):
    """The optimizer's state is not the same on all ranks

    ## What it finds
    Momentum, second moments or step counts that differ between ranks that train copies of one
    model: typically an optimizer that was resumed from a checkpoint, cleared or created anew on one
    rank only; or torch's `Join`, which broadcasts the model to ranks that took fewer steps, but not
    the optimizer. And ranks that hold different shards of a model (`fully_shard`,
    `FullyShardedDataParallel`), but load the state that one of them has saved for its own.

    ## How it knows
    Before steps 1, 2, 4 and 9, then before 19, 49, 99, 199 and so on as far as `--budget` allows,
    each rank records digests (checksums) of the state of up to 64 parameters, a different selection
    each time. The digests of one step are compared between ranks. What loads a state is recorded,
    and `gradient-drift` tells whether the gradients agreed before. A difference proves the fault.
    Before the first step after a load, each rank digests its shards of up to 64 parameters and
    their state: equal states of different shards prove it, too.

    ## Why it hurts
    The same gradients then give different updates, and the replicas diverge although every gradient
    agrees.

    ## How to fix it
    Load the optimizer's state on every rank, from the same file. DDP broadcasts parameters and
    buffers at the wrap; it never copies the optimizer. Of a sharded model `optimizer.state_dict()`
    is this rank's part only: use `get_optimizer_state_dict` and `set_optimizer_state_dict` of
    `torch.distributed.checkpoint.state_dict` with `full_state_dict=True`, or DCP.

    ## When it stays quiet
    - Sharded state (`ZeroRedundancyOptimizer`, FSDP), and state that a rank does not hold, or
      holds without using it: only one rank's changes, and the parameters stay equal.
    - State that differs because gradients or parameters did: that finding includes it.
    - Under `Join`, as long as the parameters are not seen to diverge.
    """

    code = "DDP404"
    name = "optimizer-state-drift"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **state_loading.RULES,
        manual_edits.EDIT_ON_SOME: manual_edits.RULES[manual_edits.EDIT_ON_SOME],
        STATE_CHANGED: "the state differs though gradients agree, and no line is known",
        NEW_OPTIMIZER: "some ranks continue with a new optimizer, whose state begins anew",
        OTHER_SHARD: "ranks load for their shards the state that another rank has for its own",
        causes.UNEVEN_JOIN: "under torch's `Join` ranks took different numbers of steps",
        **causes.UNKNOWN_RULES,
    }
    effects = (
        Effect(("hyperparameter-skew",), when=(state_loading.SAME_LOADS,)),
        *state_loading.RESUMED_ALONE,
        Effect(
            ("parameter-drift", "buffer-drift"),
            when=(Condition("after the state was changed", _applied),),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if run.any(ShardStates):
            return None
        if not groups:
            return NO_COPIES
        if not any(kinds(g, "state:") for g in groups):
            return "no optimizer state was recorded (there is none, or only one step was taken)"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge)
        for same in same_states(run):
            yield self._of_another_shard(same)

    def _of_another_shard(self, same: SameStates) -> Finding:
        """Ranks hold different shards, and have loaded the same state."""
        rank, event = next(iter(same.ranks.items()))
        return self.finding(
            rule=OTHER_SHARD,
            ranks=tuple(r.rank for r in same.ranks),
            subjects=same.names,
            location=rank.location(event.site),
            label="loads the same state on each rank",
            summary=f"ranks hold different shards of {some(same.names)}, but load the same state "
            "of the optimizer for them",
            cause="`optimizer.state_dict()` of a sharded model holds the state of this rank's "
            "shards only: what one rank has saved belongs to its own shards, and is wrong for "
            "those of the others",
            fix="save and load with `get_optimizer_state_dict(model, optimizer, options=options)` "
            "and `set_optimizer_state_dict(...)` of `torch.distributed.checkpoint.state_dict`, "
            "called on every rank, where options is `StateDictOptions(full_state_dict=True)`; or "
            "let every rank save and load a file of its own",
            fix_kind=FixKind.CHECK,
            evidence={"state_was_loaded": True, "parameters_compared": len(same.names)},
            at=rank.wall(event.at),
        )

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            yield from self._under_join(group)
            return
        found = (d for kind in kinds(group, "state:") if (d := divergence(group, kind)))
        diverged = [d for d in found if not kept_by_one(group, d)]
        if not diverged:
            yield from self._new_optimizer(run, group)
            return
        first = min(diverged, key=lambda d: d.first)
        if first.healed >= 0:
            return
        cause = state_loading.loaded(group, "optimizer", first)
        if cause is None and _gradients_differ(group, first):
            return
        cause = (
            cause
            or manual_edits.edited_once(group, first, "state")
            or _state_changed(group, diverged)
            or causes.unknown(group, first, "gradients agree, and no state was loaded")
        )
        what = listed([_name(d.kind) for d in diverged])
        tensors = {
            _name(d.kind): f"{counted(len(d.names), 'tensor')}, from step {d.first}"
            for d in diverged
        }
        yield self.finding(
            **causes.fields(group, first, cause),
            summary=f"optimizer state ({what}) of {some(first.names)} "
            f"{causes.differ(1, first.split, run)}, "
            f"first seen at step {first.first}{causes.of_optimizer(group)}",
            evidence={
                "state_was_loaded": cause.rule in state_loading.RULES,
                "independent_of_gradients": cause.rule != causes.UNKNOWN,
            }
            | ({causes.LAST_EQUAL: first.before} if first.before >= 0 else {})
            | cause.evidence
            | tensors,
        )

    def _new_optimizer(self, run: Run, group: Replicas) -> Iterator[Finding]:
        """Some ranks continue with another optimizer over the same parameters, the others do not,
        and the copies are no longer equal."""
        state = [_name(kind) for kind in kinds(group, "state:")]
        anew = {n: e for n, m in group.members.items() if (e := _successor(m)) is not None}
        keep = [m for n, m in group.members.items() if n not in anew]
        points = [p for p in ("eval", "end") if divergence(group, "parameters", p)]
        if not (state and anew and keep and points):
            return
        ranks = tuple(sorted(anew))
        member, event = group.members[ranks[0]], anew[ranks[0]]
        first, last = member.last_step + 1, max(m.last_step for m in keep)
        if last < first:
            return
        yield self.finding(
            rule=NEW_OPTIMIZER,
            ranks=ranks,
            steps=Steps(first, last, last - first + 1),
            subjects=tuple(group.names("parameters")),
            location=member.rank.location(event.site),
            label="created anew on some ranks only",
            summary=f"{ranks_do(ranks, 'continue')} with a new {event.kind} from step {first} on, "
            f"without its previous {listed(state)}; the other ranks keep theirs",
            cause="the same gradients give different updates with different state: the parameters "
            f"differ {_WHEN[points[0]]}",
            fix="create the optimizer on every rank at the same step, or on none",
            evidence={"independent_of_gradients": True, "parameters_differ": _WHEN[points[0]]},
            at=member.rank.wall(event.at),
        )

    def _under_join(self, group: Replicas) -> Iterator[Finding]:
        """`Join` broadcasts the model at its end, but not the optimizer's state."""
        state = [_name(kind) for kind in kinds(group, "state:")]
        uneven = uneven_epochs.diverging(group) if state else None
        if uneven is None:
            return
        rank = group.any.rank
        taken = {n: e.step for n, e in uneven.began.items()}
        epoch = uneven.number
        first = min(taken.values())
        last = max(m.last_step for m in group.members.values())
        made = next(iter(group.any.of(OptimizerSeen)), None)
        kind, spot = (made.kind, rank.location(made.site)) if made else ("optimizer", None)
        every = group.names("parameters")
        loop = rank.location(uneven.began[rank.rank].site)
        yield self.finding(
            rule=causes.UNEVEN_JOIN,
            ranks=tuple(taken),
            steps=Steps(first, last, last - first + 1),
            subjects=tuple(every),
            location=spot or loop,
            label="`Join` does not synchronise its state",
            related=(Related("loops over the batches here", loop),) if spot and loop else (),
            summary=f"the state of {kind} ({listed(state)}) differs between ranks from epoch "
            f"{epoch} on: steps before it are {_listed(taken)}",
            cause="inside `Join` a rank that has run out of batches takes no steps. At its end the "
            "model is broadcast, the optimizer's state is not, so that equal gradients give "
            f"different updates: in epoch {epoch} the parameters began equal and differed after "
            f"{counted(uneven.steps, 'step')}",
            fix="give every rank equally many batches, or stop all after the shortest "
            "(`Join([model], throw_on_early_termination=True)` raises on every rank); or broadcast "
            "the optimizer's state of a rank that took every step after each `Join`",
            fix_kind=FixKind.CHECK,
            evidence={
                "steps_before_the_epoch": taken,
                "differ": f"{len(uneven.positions)} of {len(every)} parameters, "
                f"after {counted(uneven.steps, 'step')} of the epoch",
            },
            at=rank.wall(uneven.began[rank.rank].at),
        )


def _name(kind: str) -> str:
    """The name of a kind of state: `exp_avg` of `state:exp_avg`."""
    return kind.partition(":")[2]


def _listed(taken: dict[int, int]) -> str:
    return some((f"{count} on rank {n}" for n, count in taken.items()), 4)


_WHEN = {"eval": "at evaluation", "end": "at the end of the run"}


def _successor(member: Member) -> OptimizerSeen | None:
    """An optimizer of the same parameters that steps from the last step of this one on."""
    last = max((e.at for e in member.of(StepDone)), default=0.0)
    mine = (member.model, member.seen.parameters)
    same = {e.optimizer for e in member.rank.of(Replica) if (e.model, e.parameters) == mine}
    others = (e for e in member.rank.of(OptimizerSeen) if e.optimizer in same)
    return next((e for e in others if e.optimizer != member.optimizer and e.at >= last), None)


def _state_changed(group: Replicas, diverged: list[Divergence]) -> Cause | None:
    """The state cannot differ because gradients or parameters do: something else changed it."""
    if not _independent(group, diverged):
        return None
    return Cause(
        STATE_CHANGED,
        text="the ranks step with equal gradients, and no state was loaded: the state was modified "
        "(cleared, replaced), or a step was taken that the other ranks did not take",
        fix="modify `optimizer.state` on every rank in the same way, or not at all",
        label="steps with different state",
    )


def _independent(group: Replicas, diverged: list[Divergence]) -> bool:
    """Whether the state cannot differ because the parameters do: with equal gradients that takes a
    weight decay, which is added to the gradients, and step counts do not follow even then."""
    keys = {_name(d.kind) for d in diverged}
    if "step" in keys:
        return True
    if not keys <= OF_GRADIENTS:
        return False
    reported = group.any.of(Hyperparameters)
    return bool(reported) and not any(g.get("weight_decay") for e in reported for g in e.groups)


def _gradients_differ(group: Replicas, found: Divergence) -> bool:
    """Whether the state differs because gradients did before (`gradient-drift` reports them)."""
    gradients = (divergence(group, kind) for kind in ("gradients", "local"))
    return any(g is not None and g.first < found.first for g in gradients)
