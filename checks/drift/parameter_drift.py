"""DDP402."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import classify, optimizer_coverage, rules
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
from ddpdoctor.report.declarations import Condition, Effect, When
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, ranks_text, some

AT_EVALUATION = "at evaluation"
AT_THE_END = "at the end of the run"

PARTIAL_STATE = "partial-optimizer-state"
LOCAL_LOSS = "rank-local-loss"


def _with_it(mine: Finding) -> list[object]:
    """What else the ranks loaded that loaded other weights."""
    loaded_too = mine.evidence.get(state_loading.LOADED_TOO)
    return loaded_too if isinstance(loaded_too, list) else []


def _moved_the_state(mine: Finding, other: Finding) -> bool:
    known = mine.rule in skipped_steps.RULES or "optimizer" in _with_it(mine)
    return known or not causes.changed_state(other)


_DIFFER = Condition(
    "if the cause is more than a note and names parameters",
    lambda mine, _: mine.severity is not Severity.NOTE and bool(mine.subjects),
)


class ParameterDrift(Check):
    """Parameters are not the same on all ranks

    ## What it finds
    Parameters that differ between ranks that should hold identical copies, bit for bit: weights
    loaded on one rank after the wrap, parameters modified or restored on one rank, updates that
    differ between ranks. This includes wrapped models that no optimizer holds, and parameters that
    the optimizers of only some ranks hold. It also covers models without a wrapper whose gradients
    the program synchronises manually (its own all-reduce), on all ranks or within a group: copies
    that differ from the start or from a step on, gradients that the all-reduce never includes or no
    longer includes, gradients applied before an asynchronous all-reduce has finished, steps that
    some ranks skip, and updates that a custom optimizer applies on some ranks only.

    ## How it knows
    Each rank records digests (checksums) of its parameters, and the digests of the same moment are
    compared afterwards; nothing is communicated. Wrapped models are examined before each of the
    first 128 optimizer steps, then as often as `--budget` allows; all parameters at the first
    evaluations after training and at the end. Models that no optimizer holds are examined after
    backwards 0, 1, 2, 4, 9, 19, 49 and so on; models without a wrapper before steps 0, 1, 2, 4, 8
    and so on, more often with at most 64 parameters. A difference proves the fault. It is only
    suspected where a manual all-reduce stops before half of the run, stops in one group while
    another group continues, or leaves out whole layers.

    ## Why it hurts
    DDP averages gradients, never parameters. Copies that differ stay different, even while
    gradients agree: each rank computes the gradients of a different model, and the checkpoint is
    whatever rank 0 holds.

    ## How to fix it
    Load weights before `DistributedDataParallel(...)`, which broadcasts those of rank 0, or load
    the same file on every rank. Modify parameters on all ranks in the same way.

    ## When it stays quiet
    - Sharded parameters, ranks of different groups, and parameters that DDP ignores (the report
      lists these as not compared).
    - Local SGD: copies that differ for some steps and are averaged again; weights that are swapped
      temporarily (EMA at evaluation).
    - Parameters that every rank modifies and restores in each step up to rounding errors (SAM) are
      a warning.
    - Copies that differ only after the last step are a note, unless some ranks took fewer steps for
      equally many synchronised backwards.
    - Manual synchronisation: gradients synchronised in less than half of the steps, unless an
      all-reduce made in every step stops for good and nothing replaces it; groups whose ranks send
      to each other; copies that are equal again later.
    - Note: manual synchronisation leaves out whole layers (separate heads may be intended), or one
      optimizer that holds one part of the model.
    - Warning: the layers were synchronised before, or the optimizer's parameters are not one part.
    - Error: parameters of one layer are treated differently; suspected: consecutive layers of a
      larger part are left out, although a collective sent all parameters before the first step.
    """

    code = "DDP402"
    name = "parameter-drift"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **state_loading.RULES,
        **manual_edits.PARAMETER_RULES,
        **tensor_writes.RULES,
        **skipped_steps.RULES,
        causes.NO_OPTIMIZER: "no optimizer holds the parameters: the program writes them itself",
        PARTIAL_STATE: "each rank holds part of the optimizer's state, and updates are not sent",
        LOCAL_LOSS: "an optimizer that calls a closure (LBFGS) decides by each rank's own loss",
        **causes.UNKNOWN_RULES,
        **rules.RULES,
        **optimizer_coverage.RULES,
    }
    effects = (
        Effect(("gradient-drift",), rules=(causes.UNEQUAL_PARAMETERS,), when=(_DIFFER,)),
        Effect(
            ("hyperparameter-skew",),
            when=(
                _DIFFER,
                state_loading.SAME_LOADS,
                Condition("loaded with the weights", lambda mine, _: bool(_with_it(mine))),
            ),
        ),
        # The epoch was loaded with the weights.
        Effect(
            ("sampler-seed-skew",),
            of=(state_loading.LOAD_ON_SOME,),
            rules=("different-epochs",),
            when=(_DIFFER,),
        ),
        Effect(("buffer-drift",), when=(_DIFFER, When.NOT_BEFORE)),
        Effect(
            ("optimizer-state-drift",),
            when=(
                _DIFFER,
                When.NOT_BEFORE,
                Condition("unless changed by itself", _moved_the_state),
            ),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run, unheld=True)
        if not groups and (classify.judged(run) or optimizer_coverage.compared(run)):
            return None
        if not groups:
            return NO_COPIES
        if not any(compared(g, "parameters", p) for g in groups for p in ("step", "eval")):
            return "there is no step at which parameters of two ranks were examined"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from each_model(run, self._judge, unheld=True)
        yield from classify.findings(self, run)
        for fields in optimizer_coverage.reported(run):
            yield self.finding(**fields)

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        if group.left_out:
            return
        skipped = skipped_steps.before_a_step(group)
        steps = None if skipped else divergence(group, "parameters")
        if not (skipped or steps) and run.outcome() == "completed":  # else one stopped in a step
            skipped = skipped_steps.in_the_end(group)
        if skipped is not None:
            yield self._skipped(group, skipped)
            return
        found = steps or divergence(group, "parameters", "eval")
        if found is not None:
            again = found.healed >= 0 and not state_loading.reloads(group, "weights", found.at)
            if again and not _sends_parameters(group):
                return  # averaged again by the program: local SGD
            cause = _cause(group, found)
            mild = cause.rule == manual_edits.INEXACT_RESTORE
            severity = Severity.WARNING if mild else Severity.ERROR
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
            if cause.trained or run.outcome() == "completed":  # else one may have stopped in a step
                yield self._finding(run, group, last, cause, severity=severity)

    def _skipped(self, group: Replicas, skipped: Skipped) -> Finding:
        ranks, step, made, taken = skipped.ranks, skipped.step, skipped.backwards, skipped.taken
        least, who, kind = min(made.values()), ranks_text(skipped.ranks), group.any.wrapped.kind
        if taken:
            summary = (
                f"{who} took {taken[ranks[0]]} optimizer steps of {kind} in {least} synchronised "
                f"backwards, the other ranks took {max(taken.values())}"
            )
        else:
            summary = (
                f"{who} skipped an optimizer step of {kind}: step {step} follows "
                f"{made[ranks[0]]} synchronised backwards there, {least} on other ranks"
            )
        until = ""
        if skipped.together >= 0:
            until = f", until they are equal again at step {skipped.together}"
        evidence: dict[str, object] = {
            "synchronised_backwards" + ("" if taken else "_before_the_step"): [
                {"rank": n, "backwards": count, **({"steps": taken[n]} if taken else {})}
                for n, count in made.items()
            ]
        }
        if skipped.fewer:
            evidence["updates_missing"] = [
                {"rank": n, "updates": count} for n, count in skipped.fewer.items()
            ]
        return self.finding(
            rule=skipped_steps.FEWER if taken else skipped_steps.SKIPPED,
            ranks=ranks,
            steps=skipped.steps,
            subjects=tuple(group.names("parameters")),
            location=causes.step_line(group, ranks),
            label="skipped at least once, on some ranks only",
            summary=summary,
            cause="DDP averaged the gradients on all ranks, but not all ranks applied them: the "
            f"parameters differ by the missing updates{until}",
            fix="take the step on every rank; if a step is to be skipped, decide it from values "
            "that are equal on all ranks (all-reduce the condition)",
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
        counted = "synchronised backward" if unheld else "step"
        begun = f"{counted} {found.first}"
        if unseen := found.unseen:
            begun = f"a {counted} between {unseen[0]} and {found.first}"
        of = " (counted from 0)" if unheld else causes.of_optimizer(group)
        since = f"since {begun}{of}" if of else f"from {begun} on"
        when = {"step": since, "eval": AT_EVALUATION, "end": AT_THE_END}
        when["again"] = when["eval"]
        if cause.trained:
            when["end"] = f"at the end of the run, since step {cause.trained.first} at the latest"
        size = causes.by_how_much(group, found)
        fields = causes.fields(group, found, cause)
        if found.point != "step":
            fields["steps"] = cause.trained
        return self.finding(
            **fields,
            severity=severity,
            summary=f"{some(found.names)} of {group.any.wrapped.kind} "
            f"{causes.differ(len(found.names), found.split, run)} {when[found.point]}"
            f"{size and ','}{size}",
            evidence=causes.evidence(group, found) | cause.evidence,
        )


def _sends_parameters(group: Replicas) -> bool:
    """Whether the optimizer itself broadcasts parameters in its step, each from the rank that holds
    its part of the state. If they differ before a step, something else modified them."""
    return any(e.kind == "ZeroRedundancyOptimizer" for e in _optimizers(group))


def _cause(group: Replicas, found: Divergence) -> Cause:
    """The first explanation that applies: those that name a line come first."""
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
    gradients_differ = divergence(group, "gradients") is not None
    if gradients_differ:
        agree = "differ too"
    else:
        compares = compared(group, "gradients")
        agree = "agree at the steps compared" if compares else "were not compared"
    places = {"step": f"at step {found.first}", "end": AT_THE_END}
    place = f"first seen {places.get(found.point, AT_EVALUATION)} on {ranks_text(found.minority)}"
    cause = causes.unknown(group, found, f"gradients {agree}; {place}")
    if not gradients_differ and (held := divided(group)):
        cause = replace(
            cause,
            rule=PARTIAL_STATE,
            text=f"each rank holds the optimizer's {held} for its own part of the parameters only. "
            "The updates of the other parameters have to come from the other ranks, and not all "
            f"do; gradients {agree}",
            fix="communicate the updates in the optimizer's step (`dist.all_reduce(updates)`), or "
            "compute all of them on every rank",
            label="applies updates that differ between ranks",
        )
    elif not gradients_differ and _decides_by_loss(group):
        cause = replace(
            cause,
            rule=LOCAL_LOSS,
            text="the optimizer's line search uses the loss that the closure returns, and each "
            f"rank returns the loss of its own batch; gradients {agree}",
            fix="return the same loss on every rank: in the closure, after `loss.backward()`, "
            "`loss = loss.detach()`, `dist.all_reduce(loss)`, then divide it by the world size",
            label="decides by each rank's own loss",
        )
    return replace(cause, evidence={"gradients": agree})


def _decides_by_loss(group: Replicas) -> bool:
    """Whether the optimizer calls a closure repeatedly within a step (LBFGS)."""
    member = group.any
    done = (e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer)
    return any(e.closure for e in _optimizers(group)) and any(e.backwards > e.count for e in done)


def _optimizers(group: Replicas) -> Iterator[OptimizerSeen]:
    """The optimizer of the copies, as one of the ranks recorded it."""
    member = group.any
    return (e for e in member.rank.of(OptimizerSeen) if e.optimizer == member.optimizer)
