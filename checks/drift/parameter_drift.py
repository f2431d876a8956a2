"""DDP402."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddpdoctor.analysis.manual_sync import (
    kept_equal,
    never_synced,
    optimizer_coverage,
    other_optimizer,
    sync_stopped,
    unequal_updates,
)
from ddpdoctor.analysis.replicas import (
    causes,
    manual_edits,
    skipped_steps,
    state_loading,
    tensor_writes,
)
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    compared,
    divergence,
    divided,
    each_model,
    replicas,
)
from ddpdoctor.analysis.replicas.skipped_steps import Skipped
from ddpdoctor.analysis.replicas.uncompared import uncompared
from ddpdoctor.events import OptimizerSeen, StepDone
from ddpdoctor.events.drift import UNHELD
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, ranks_do, ranks_text, some


class ParameterDrift(Check):
    """The ranks' copies of the parameters are not the same

    ## What it finds
    Parameters that differ between ranks which should hold equal copies, to the last bit: weights
    loaded on one rank after the wrap, values edited or copied back on one rank, updates that were
    not the same everywhere. Also of wrapped models that no optimizer holds (which holds copies of
    them, or there is none), of parameters that the optimizer of some ranks holds and changes and
    that never change on others, and of models without a wrapper whose gradients the ranks, all or
    those of a group, exchange by hand: copies that were seen to stay equal so and part; copies that
    differ from the start; gradients that the exchange leaves out in every step, or from one on, or
    that are applied while an asynchronous exchange of them still runs; steps that some ranks leave
    out though they exchanged the gradients; updates that an optimizer of the program's own applies
    on some ranks only.

    ## How it knows
    Before each of the first 128 optimizer steps, and then before as many as `--budget` allows (at
    least eight while their number doubles), each rank digests parameters: all or a share of them,
    as `gradient-drift` does with gradients; and all of them at the first evaluation after training,
    at up to seven that follow it without training, and at the end. Of models that no optimizer
    holds it does so after backwards 0, 1, 2, 4, 9, 19, 49 and so on, of those without a wrapper
    before steps 0, 1, 2, 4, 8 and so on, and more often where they have no more than 64 parameters.
    The digests of one moment are compared between the ranks afterwards, and nothing is communicated
    for it. The finding is proven, but suspected where an exchange by hand stops before half of the
    run, or while another group goes on with its own, or leaves out whole layers.

    ## Why it hurts
    DDP averages gradients, never parameters. Copies that differ once stay apart for ever, also
    while gradients agree: each rank computes gradients of another model, and the checkpoint is
    whatever rank 0 happens to hold.

    ## How to fix it
    Load weights before `DistributedDataParallel(...)`, which then copies those of rank 0, or load
    the same file on every rank. Edit parameters on all ranks alike.

    ## When it stays quiet
    Sharded parameters; those that DDP is told to ignore, which the report names as left out; ranks
    of different groups; local SGD, where copies that differ are averaged again; weights that are
    exchanged for a while and put back (EMA at evaluation). What every rank changes for a moment in
    every step, and takes back by arithmetic but for rounding errors (SAM), is a warning.
    Without a wrapper also: gradients that are exchanged in less than half of the steps since they
    part, unless the exchange, made in every step until then, stops for good and nothing takes its
    place (parameters that are averaged, other collectives that carry as much); ranks of a group
    that send to each other; copies that are equal again later. Gradients of whole layers that are
    never exchanged while those of the others are (heads of their own) are a note: a layer whose
    weight is exchanged and whose bias is not is an error, and so are, suspected, layers in a row of
    a larger part of the model, if a collective carried all parameters before the first step. Layers
    that are exchanged no more from a step on are a warning. So with all parameters of one
    optimizer, where those of another one of the same model are exchanged: a warning, or a note if
    either are in one part of it. Copies that differ only when the run is over are a note, unless
    some ranks took fewer steps for as many averaging backwards.
    """

    code = "DDP402"
    name = "parameter-drift"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run, unheld=True)
        ways = (kept_equal, never_synced, unequal_updates, optimizer_coverage)
        if not groups and any(way.compared(run) for way in ways):
            return None
        if not groups:
            return NO_COPIES
        if not any(compared(g, "parameters", p) for g in groups for p in ("step", "eval")):
            return "the ranks have no step in common at which parameters were digested"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge, unheld=True)
        for way in (
            kept_equal,
            sync_stopped,
            never_synced,
            other_optimizer,
            unequal_updates,
            optimizer_coverage,
        ):
            for reported in way.reported(run):
                yield self.finding(**reported)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if mine.severity is Severity.NOTE or not mine.subjects:
            return False
        skipped = any(name.startswith("averaging_backwards") for name in mine.evidence)
        if other.check == "gradient-drift":
            return "parameters_differ_since_step" in other.evidence
        own = other.check == "optimizer-state-drift" and other.evidence.get(
            "not_from_unlike_gradients"
        )
        with_them = str(mine.evidence.get("loaded_with_them", ""))
        if own and not skipped and state_loading.THINGS["optimizer"] not in with_them:
            return False
        if other.check == "hyperparameter-skew" and with_them:
            return state_loading.of_the_same(mine, other)
        if other.check == "sampler-seed-skew":  # the epoch came with the weights
            alone = bool(mine.evidence.get(state_loading.ONLY_ON))
            return alone and bool(other.evidence.get("each rank set its epoch"))
        return other.check in ("buffer-drift", "optimizer-state-drift") and other.at >= mine.at

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            return
        skipped = skipped_steps.before_a_step(group)
        steps = None if skipped else divergence(group, "parameters")
        if not (skipped or steps) and run.outcome() == "completed":  # else one was in mid-step
            skipped = skipped_steps.in_the_end(group)
        if skipped is not None:
            yield self._left_out(group, skipped)
            return
        found = steps or divergence(group, "parameters", "eval")
        if found is not None:
            again = found.healed >= 0 and not state_loading.reloads(group, "weights", found.at)
            if again and not _sends_parameters(group):
                return  # averaged again by the program: local SGD
            cause = _cause(group, found)
            severity = Severity.WARNING if cause.put_back else Severity.ERROR
            yield self._finding(run, group, found, cause, severity)
            return
        later = divergence(group, "parameters", "again")
        if later is not None and not state_loading.each_its_own(group, later.at):
            yield self._finding(run, group, later, _cause(group, later))
            return
        if group.any.optimizer == UNHELD:
            return
        if (last := divergence(group, "parameters", "end")) is not None:
            cause = _cause(group, last)
            severity = Severity.ERROR if cause.trained else Severity.NOTE
            if cause.trained or run.outcome() == "completed":  # else one was in mid-step, maybe
                yield self._finding(run, group, last, cause, severity=severity)

    def _left_out(self, group: Replicas, skipped: Skipped) -> Finding:
        ranks, step, made, taken = skipped.ranks, skipped.step, skipped.backwards, skipped.taken
        least = min(made.values())
        reported = f"step {step} comes after {made[ranks[0]]} averaging backwards, not {least}"
        if taken:
            reported = (
                f"{taken[ranks[0]]} steps in {least} averaging backwards, where the others take "
            )
            reported += f"{max(taken.values())}"
        until = " from then on"
        if skipped.together >= 0:
            until = f", until they are equal again at step {skipped.together}"
        evidence: dict[str, object] = {
            "averaging_backwards" + ("" if taken else "_before_the_step"): [
                {"rank": n, "backwards": count, **({"steps": taken[n]} if taken else {})}
                for n, count in made.items()
            ]
        }
        if skipped.fewer:
            evidence["updates_left_out"] = [
                {"rank": n, "updates": count} for n, count in skipped.fewer.items()
            ]
        return self.finding(
            ranks=ranks,
            steps=skipped.steps,
            subjects=tuple(group.names("parameters")),
            location=causes.step_line(group, ranks),
            label=f"left out on {ranks_text(ranks)} at least once",
            summary=f"{ranks_do(ranks, 'skip')} optimizer steps of {group.any.wrapped.kind} "
            f"that the others take: {reported}",
            cause="the ranks averaged the same gradients, and not all of them applied them: their "
            f"parameters are that many updates apart{until}",
            fix="take the step on every rank; decide what to skip from numbers that are equal on "
            "all ranks (all-reduce the condition)",
            evidence=evidence,
            at=min(m.rank.wall(causes.step_time(m, step)) for m in group.members.values()),
        )

    def _finding(
        self,
        run: Run,
        group: Replicas,
        found: Divergence,
        cause: Cause,
        severity: Severity = Severity.ERROR,
    ) -> Finding:
        unheld = group.any.optimizer == UNHELD
        begun = f"{'averaging backward' if unheld else 'step'} {found.first}"
        if unseen := found.unseen:
            begun = f"some {'backward' if unheld else 'step'} between {unseen[0]} and {found.first}"
        begun += "" if unheld else causes.of_optimizer(group)
        when = {"step": f"from {begun} on", "eval": "at evaluation", "end": "at the end"}
        when["again"] = when["eval"]
        if cause.trained:
            when["end"] = f"at the end, and since step {cause.trained.first} at the latest"
        reported = causes.reported(group, found, cause)
        if found.point != "step":
            reported["steps"] = cause.trained
        return self.finding(
            **reported,
            severity=severity,
            summary=f"{some(found.names)} of {group.any.wrapped.kind} "
            f"{causes.differ(len(found.names), found.split, run)}{causes.largest(group, found)}, "
            f"{when[found.point]}",
            evidence=causes.evidence(group, found) | cause.evidence,
        )


def _sends_parameters(group: Replicas) -> bool:
    """Whether the optimizer itself makes parameters equal in its step: each from the rank that
    holds its part of the state. What parts between two steps was edited all the same."""
    return any(e.kind == "ZeroRedundancyOptimizer" for e in _optimizers(group))


def _cause(group: Replicas, found: Divergence) -> Cause:
    if (cause := state_loading.loaded(group, "weights", found)) is not None:
        return cause
    if found.point == "step" and (cause := manual_edits.edited(group, "parameters", found)):
        return cause
    if found.point == "step" and (cause := manual_edits.edited_once(group, found)):
        return cause
    if found.point == "step" and (cause := manual_edits.before_the_step(group, found)):
        return cause
    if group.any.optimizer == UNHELD:
        return causes.written(group, found)
    if found.point == "end" and (cause := tensor_writes.after_the_last_step(group)):
        return cause
    if (seen := tensor_writes.written(group, found)) is not None:
        return tensor_writes.cause(seen)
    if divergence(group, "gradients") is not None:
        agree = "differ too"
    else:
        compares = compared(group, "gradients")
        agree = "agree at the steps compared" if compares else "were not compared"
    place = f"at {'eval' if found.point == 'again' else found.point}"
    if found.point == "step":
        place = f"first seen at step {found.first}"
    cause = causes.unknown(
        group, found, f"gradients {agree}, {place} on {ranks_text(found.minority)}"
    )
    if agree != "differ too" and (held := divided(group)):
        cause = replace(
            cause,
            text=f"each rank holds the optimizer's {held} of its own part of the parameters only: "
            "its updates of the others have to come from the other ranks, and not all of them do; "
            f"gradients {agree}",
            fix="exchange the updates in the optimizer's step (`dist.all_reduce(updates)`), or "
            "compute all of them on every rank",
            label="applies updates that differ between ranks",
        )
    elif agree != "differ too" and _decides_by_loss(group):
        cause = replace(
            cause,
            text="the optimizer searches along the gradient by the loss that the closure returns, "
            f"and each rank returns the loss of its own batch; gradients {agree}",
            fix="return the same loss on every rank: in the closure, after `loss.backward()`, "
            "`loss = loss.detach()`, `dist.all_reduce(loss)`, and divide it by the world size",
            label="decides from this rank's own loss",
        )
    return replace(cause, evidence={"gradients": agree})


def _decides_by_loss(group: Replicas) -> bool:
    """Whether the optimizer calls a closure again and again within a step (LBFGS)."""
    member = group.any
    done = (e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer)
    return any(e.closure for e in _optimizers(group)) and any(e.backwards > e.count for e in done)


def _optimizers(group: Replicas) -> Iterator[OptimizerSeen]:
    """The optimizer of the copies, as one of the ranks saw it."""
    member = group.any
    return (e for e in member.rank.of(OptimizerSeen) if e.optimizer == member.optimizer)
