"""DDP404."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddpdoctor.analysis.replicas import causes, manual_edits, state_loading, uneven_epochs
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
from ddpdoctor.events import Hyperparameters, OptimizerSeen, Replica, StepDone
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, ranks_do, ranks_text, some

OF_GRADIENTS = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev",
}  # fmt: skip
"""State of torch's optimizers that is made of gradients alone, where no weight decay is added."""


class OptimizerStateDrift(Check):
    """The optimizer's state is not the same on all ranks

    ## What it finds
    Momentum, second moments or step counts that differ between ranks which train copies of one
    model: typically an optimizer that was resumed from a checkpoint, cleared or made anew on one
    rank only; or torch's `Join`, which copies the model to ranks that took fewer steps, not the
    optimizer.

    ## How it knows
    Before steps 1, 2, 4 and 9, and before 19, 49, 99, 199 and so on as far as `--budget` allows,
    each rank digests the state of up to 64 parameters, which change from look to look. The digests
    of one step are compared between the ranks. What loads a state is recorded, and whether the
    gradients agreed before is known from `gradient-drift`. The finding is proven.

    ## Why it hurts
    The same gradients then give different updates, and the models drift apart although every
    gradient agrees.

    ## How to fix it
    Load the optimizer's state on every rank, from the same file. DDP copies parameters and buffers
    at the wrap; it never copies the optimizer.

    ## When it stays quiet
    Sharded state (`ZeroRedundancyOptimizer`, FSDP), and any that a rank does not hold; state that
    differs because the gradients did is told with those. Under `Join`, as long as the parameters
    are not seen to move apart.
    """

    code = "DDP404"
    name = "optimizer-state-drift"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if not groups:
            return NO_COPIES
        if not any(kinds(g, "state:") for g in groups):
            return "no optimizer's state was digested (it has none, or there was one step only)"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        return each_model(run, self._judge)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "hyperparameter-skew":
            return state_loading.of_the_same(mine, other)
        later = ("parameter-drift", "buffer-drift")
        skipped = "averaging_backwards_before_the_step" in other.evidence
        own = bool(mine.evidence.get("not_from_unlike_gradients")) and not skipped
        # By the next step; by hand, perhaps at once.
        applied = bool(mine.evidence.get("state_was_loaded"))
        return own and other.check in later and causes.may_follow(other, mine, applied)

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            yield from self._under_join(group)
            return
        parted = [d for kind in kinds(group, "state:") if (d := divergence(group, kind))]
        if not parted:
            yield from self._remade(run, group)
            return
        first = min(parted, key=lambda d: d.first)
        if first.healed >= 0:
            return
        own = False
        cause = loaded = state_loading.loaded(group, "optimizer", first)
        if cause is None:
            if _gradients_differ(group, first):
                return
            cause = manual_edits.edited_once(group, first, "state")
            own = cause is not None or _of_its_own(group, parted)
        if cause is None:
            cause = causes.unknown(group, first, "gradients agree, no state was loaded")
            if own:
                cause = replace(
                    cause,
                    text="the ranks step with equal gradients, and no state was loaded: it was "
                    "changed by hand (cleared, replaced), or a step was taken that the others did "
                    "not take",
                    fix="touch `optimizer.state` on every rank alike, or not at all",
                    label="steps with another state",
                )
        what = ", ".join(d.kind.partition(":")[2] for d in parted)
        tensors = {
            d.kind.partition(":")[2]: f"{len(d.names)} tensors, from step {d.first}" for d in parted
        }
        yield self.finding(
            **causes.reported(group, first, cause),
            summary=f"the optimizer's {what} of {some(first.names)} "
            f"{causes.differ(len(tensors) * len(first.names), first.split, run)}, "
            f"first seen at step {first.first}{causes.of_optimizer(group)}",
            evidence={
                "state_was_loaded": loaded is not None,
                "not_from_unlike_gradients": own or loaded is not None,
            }
            | ({"last_equal_at_step": first.before} if first.before >= 0 else {})
            | cause.evidence
            | tensors,
        )

    def _remade(self, run: Run, group: Replicas) -> Iterator[Finding]:
        """Some ranks go on with another optimizer over the same parameters, the others do not, and
        the copies are no longer equal."""
        state = [kind.partition(":")[2] for kind in kinds(group, "state:")]
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
            ranks=ranks,
            steps=Steps(first, last, last - first + 1),
            subjects=tuple(group.names("parameters")),
            location=member.rank.location(event.site),
            label=f"made anew on {ranks_text(ranks)} only",
            summary=f"{ranks_do(ranks, 'continue')} with a new {event.kind} from step {first} on, "
            f"whose {', '.join(state)} begins anew; the others keep theirs",
            cause="the same gradients give other updates with another state: the copies of the "
            f"parameters differ {_WHEN[points[0]]}",
            fix="make the optimizer on every rank at the same step, or on none",
            evidence={"not_from_unlike_gradients": True, "parameters_differ": _WHEN[points[0]]},
            at=member.rank.wall(event.at),
        )

    def _under_join(self, group: Replicas) -> Iterator[Finding]:
        """The model is copied at the end of each `Join`, the optimizer's state is not."""
        state = [kind.partition(":")[2] for kind in kinds(group, "state:")]
        apart = uneven_epochs.moved_apart(group) if state else None
        if apart is None:
            return
        rank = group.any.rank
        taken = {n: e.step for n, e in apart.began.items()}
        epoch = apart.began[rank.rank].epoch
        first = min(taken.values())
        last = max(m.last_step for m in group.members.values())
        kind, site = next(
            (
                (e.kind, e.site)
                for e in rank.of(OptimizerSeen)
                if e.optimizer == group.any.optimizer
            ),
            ("optimizer", -1),
        )
        every = group.names("parameters")
        loop = rank.location(apart.began[rank.rank].site)
        yield self.finding(
            ranks=tuple(taken),
            steps=Steps(first, last, last - first + 1),
            subjects=tuple(every),
            location=rank.location(site) or loop,
            label="`Join` does not copy its state",
            related=(Related("takes its steps here", loop),) if site >= 0 and loop else (),
            summary=f"the state of {kind} ({', '.join(state)}) is not the same on all ranks from "
            f"epoch {epoch} on: {_listed(taken)} steps before it",
            cause="inside `Join` a rank without more batches takes no steps; at its end the model "
            "is copied, the optimizer's state is not, so that equal gradients give other updates: "
            f"in epoch {epoch} the copies began equal and were apart after {apart.steps} "
            f"{'step' if apart.steps == 1 else 'steps'}",
            fix="give every rank equally many batches, or stop all after the shortest "
            "(`Join([model], throw_on_early_termination=True)` raises on every rank); or send the "
            "optimizer's state of a rank that took every step to all others after each `Join`",
            fix_kind=FixKind.CHECK,
            evidence={
                "steps_before_the_epoch": taken,
                "differ": f"{len(apart.positions)} of {len(every)} parameters, "
                f"after {apart.steps} of its steps",
            },
            at=rank.wall(apart.began[rank.rank].at),
        )


def _listed(taken: dict[int, int]) -> str:
    return ", ".join(f"rank {n} took {count}" for n, count in list(taken.items())[:4])


_WHEN = {"eval": "at evaluation", "end": "at the end"}


def _successor(member: Member) -> OptimizerSeen | None:
    """An optimizer of the same parameters that steps from the last step of this one on."""
    done = [e.at for e in member.rank.of(StepDone) if e.optimizer == member.optimizer]
    same = {
        e.optimizer
        for e in member.rank.of(Replica)
        if (e.model, e.parameters) == (member.model, member.seen.parameters)
    }
    later = (
        e
        for e in member.rank.of(OptimizerSeen)
        if e.optimizer in same - {member.optimizer} and e.at >= max(done, default=e.at)
    )
    return next(later, None)


def _of_its_own(group: Replicas, parted: list[Divergence]) -> bool:
    """Whether the state cannot have followed the parameters: with equal gradients it does so only
    by way of a weight decay that is added to them, and the number of steps not even then."""
    keys = {d.kind.partition(":")[2] for d in parted}
    if "step" in keys:
        return True
    if not keys <= OF_GRADIENTS:
        return False
    reported = [e for e in group.any.rank.of(Hyperparameters) if e.optimizer == group.any.optimizer]
    return bool(reported) and not any(g.get("weight_decay") for e in reported for g in e.groups)


def _gradients_differ(group: Replicas, found: Divergence) -> bool:
    """Whether the state followed gradients that were not equal: another check tells of those."""
    for kind in ("gradients", "local"):
        gradients = divergence(group, kind)
        if gradients is not None and gradients.first < found.first:
            return True
    return False
