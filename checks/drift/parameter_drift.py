"""DDP402."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ddpdoctor.analysis.manual_sync import (
    classify,
    optimizer_coverage,
    outer_modules,
    rules,
)
from ddpdoctor.analysis.meshes import mesh_drift
from ddpdoctor.analysis.replicas import (
    causes,
    gradient_patterns,
    manual_edits,
    separate_groups,
    skipped_steps,
    state_loading,
    tensor_writes,
)
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.missed_backwards import BACKWARD
from ddpdoctor.analysis.replicas.moving import divided
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    compared,
    divergence,
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


def _of_its_calls(mine: Finding, other: Finding) -> bool:
    """Whether a finding on calls is about the line whose calls pair other gradients: ranks that
    lack some make fewer of them."""
    lines = (other.location, *(r.location for r in other.related))
    return mine.location is not None and mine.location in lines


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
    some ranks skip, and updates that a custom optimizer applies on some ranks only. And models that
    DDP averages within groups of ranks only (`process_group=` of one dimension of a mesh), although
    the groups start equal and work on one training: an error where they reduce values together,
    exchange parts of batches or divide the data, else a warning. Models of DTensors on a device
    mesh (tensor parallelism, `fully_shard` with replicas): along each dimension of the mesh, what
    its ranks hold alike; of plain tensors, where ranks exchange activations in the backward and
    hold other parts of some layers, the parameters that begin equal. And modules that no wrapper
    and no optimizer holds, but that training steps call on all ranks: a target or teacher network
    that is a copy of a part of the wrapped model (other ones are a warning).

    ## How it knows
    Each rank records digests (checksums) of its parameters, and the digests of the same moment are
    compared afterwards; nothing is communicated. Wrapped models are examined before each of the
    first 128 optimizer steps, then as often as `--budget` allows; all parameters at the first
    evaluations after training and at the end. Models that no optimizer holds are examined after
    backwards 0, 1, 2, 4, 9, 19, 49 and so on; models without a wrapper before steps 0, 1, 2, 4, 8
    and so on, more often with at most 64 parameters. Of DTensors the part that a rank holds is
    examined before steps 0, 1, 2, 4, 9, 19, 49 and so on, and at the end, with its gradient; the
    placements tell which ranks hold the same part. Modules outside of wrappers are found by a
    hook on all forwards in the steps after 1 and 32 (not in programs that use `torch.compile`) and
    examined before steps 1, 2, 4, 9, 19, 49 and so on, and at the end. A difference proves the
    fault. It is only
    suspected where a manual all-reduce stops before half of the run, stops in one group while
    another group continues, or leaves out whole layers.

    ## Why it hurts
    DDP averages gradients, never parameters. Copies that differ stay different, even while
    gradients agree: each rank computes the gradients of a different model, and the checkpoint is
    whatever rank 0 holds.

    ## How to fix it
    Load weights before `DistributedDataParallel(...)`, which broadcasts those of rank 0, or load
    the same file on every rank. Modify parameters on all ranks in the same way. In an optimizer of
    your own, all-reduce what `step` computes from values of this rank (a maximum of logits, a loss)
    before it changes parameters.

    ## When it stays quiet
    - Parts of sharded parameters that one rank alone holds, and parameters that DDP ignores (the
      report lists these as not compared).
    - Dimensions of a mesh along which ranks send to each other (stages of a pipeline), unless
      placements say that parameters are replicated. A warning where only equal beginnings show that
      ranks train one model, a note where values differ by rounding errors.
    - Ranks of different groups that start with different parameters, train with other options,
      exchange activations (tensor, pipeline, expert parallelism), or are averaged by other means.
    - Local SGD: copies that differ for some steps and are averaged again; weights that are swapped
      temporarily (EMA at evaluation).
    - Parameters that every rank modifies and restores in each step up to rounding errors (SAM) are
      a warning.
    - Copies that differ only after the last step are a note, unless some ranks took fewer steps for
      equally many synchronised backwards.
    - Modules outside of wrappers that some ranks do not call in training steps, whose tensors are
      equal again later, or beside a wrapped model that itself differs.
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
        **separate_groups.RULES,
        **outer_modules.RULES,
        **mesh_drift.RULES,
    }
    effects = (
        Effect(("gradient-drift",), rules=(causes.UNEQUAL_PARAMETERS,), when=(_DIFFER,)),
        Effect(
            ("hyperparameter-skew", "optimizer-state-drift"),
            when=(
                _DIFFER,
                state_loading.SAME_LOADS,
                Condition("loaded with the weights", lambda mine, _: bool(_with_it(mine))),
            ),
        ),
        *state_loading.RESUMED_ALONE,
        Effect(
            ("collective-mismatch", "collective-shape-mismatch"),
            of=("mismatched-gradients",),
            when=(When.NOT_BEFORE, Condition("of its calls", _of_its_calls)),
        ),
        Effect(("metric-not-reduced",), of=("async-not-awaited",), when=(When.SAME_LINE,)),
        Effect(
            ("collective-mismatch", "rank-exited-early"),
            of=(skipped_steps.MISSED,),
            when=(
                Condition("with a backward of DDP", lambda _, other: BACKWARD in other.subjects),
            ),
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
        if not groups and any(separate_groups.apart(run)):
            return None
        by_hand = classify.judged(run) or optimizer_coverage.compared(run)
        if not groups and (by_hand or mesh_drift.compared(run)):
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
        for one in separate_groups.apart(run):
            yield self.finding(**one.fields(run))
        for part in mesh_drift.apart(run):
            yield self.finding(**part.fields())
        for outer in outer_modules.outer_modules(run):
            if outer.parameters:
                yield self.finding(**outer.fields(run))

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        fault = None if group.left_out else _fault(run, group)
        if isinstance(fault, Skipped):
            yield self._skipped(group, fault)
        elif fault is not None and not _averaged_again(group, fault):
            cause = causes.explained(EXPLANATIONS, group, fault)
            severity = Severity.ERROR
            if cause.rule == manual_edits.INEXACT_RESTORE:
                severity = Severity.WARNING
            elif fault.point == "end" and not cause.trained:
                severity = Severity.NOTE
            # One of several ranks that did not complete may have stopped in a step.
            if severity is not Severity.NOTE or run.outcome() == "completed":
                yield self._finding(run, group, fault, cause, severity)

    def _skipped(self, group: Replicas, skipped: Skipped) -> Finding:
        ranks, step, made, taken = skipped.ranks, skipped.step, skipped.backwards, skipped.taken
        missed = skipped.rule == skipped_steps.MISSED
        least, who, kind = min(made.values()), ranks_text(skipped.ranks), group.any.wrapped.kind
        until = ""
        if skipped.together >= 0:
            until = f", until they are equal again at step {skipped.together}"
        cause = (
            "DDP averaged the gradients on all ranks, but not all ranks applied them: the "
            f"parameters differ by the missing updates{until}"
        )
        fix = (
            "take the step on every rank; if a step is to be skipped, decide it from values that "
            "are equal on all ranks (all-reduce the condition)"
        )
        if taken:
            summary = (
                f"{who} took {taken[ranks[0]]} optimizer steps of {kind} in {least} synchronised "
                f"backwards, the other ranks took {max(taken.values())}"
            )
        elif missed:
            summary = (
                f"a backward of {who} before step {step} did not reach {kind}: that step follows "
                f"{least} synchronised backwards there, {max(made.values())} on other ranks"
            )
            cause = (
                "a loss that does not depend on the wrapped model synchronises nothing: the next "
                f"backward of {who} is matched with this one of the other ranks, and so on, so "
                "that each averages gradients of other steps"
            )
            fix = (
                "compute the loss of every rank from the model's output in every step, multiplied "
                "by 0 where there is nothing to learn from (`out.sum() * 0`); or let all ranks "
                "skip the step, by a condition that is all-reduced"
            )
        else:
            summary = (
                f"{who} skipped an optimizer step of {kind}: step {step} follows "
                f"{made[ranks[0]]} synchronised backwards there, {least} on other ranks"
            )
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
            rule=skipped.rule,
            ranks=ranks,
            steps=skipped.steps,
            subjects=tuple(group.names("parameters")),
            location=(missed and gradient_patterns.backward_line(group.members[ranks[0]], step))
            or causes.step_line(group, ranks),
            label="reaches no parameter of the model at least once, on some ranks only"
            if missed
            else "skipped at least once, on some ranks only",
            summary=summary,
            cause=cause,
            fix=fix,
            evidence=evidence,
            at=min(m.rank.wall(causes.step_time(m, step)) for m in group.members.values()),
        )

    def _finding(
        self, run: Run, group: Replicas, found: Divergence, cause: Cause, severity: Severity
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


def _fault(run: Run, group: Replicas) -> Skipped | Divergence | None:
    """The first sign that the copies are not equal: steps that some ranks skip come before what
    follows from them, and what was seen at a step before what was seen later."""
    completed = run.outcome() == "completed"  # else a rank may have stopped in a step
    at_steps = skipped_steps.before_a_step(group) or divergence(group, "parameters")
    if fault := (
        at_steps
        or (skipped_steps.in_the_end(group) if completed else None)
        or divergence(group, "parameters", "eval")
    ):
        return fault
    again = divergence(group, "parameters", "again")
    if again is not None and not state_loading.each_its_own(group, again.at):
        return again
    return None if group.any.optimizer == UNHELD else divergence(group, "parameters", "end")


def _averaged_again(group: Replicas, found: Divergence) -> bool:
    """Whether the program itself made the copies equal again (local SGD): nothing was loaded, and
    the optimizer does not broadcast parameters from the ranks that hold its state
    (`ZeroRedundancyOptimizer`: if they differ before a step, something else modified them)."""
    if found.point not in ("step", "eval"):
        return False
    sends = any(e.kind == "ZeroRedundancyOptimizer" for e in group.any.of(OptimizerSeen))
    return not sends and state_loading.equal_again(group, found)


def _partial_state(group: Replicas, found: Divergence) -> Cause | None:
    held = divided(group)
    if not held or not _gradients_agree(group):
        return None
    return Cause(
        PARTIAL_STATE,
        text=f"each rank holds the optimizer's {held} for its own part of the parameters only. "
        "The updates of the other parameters have to come from the other ranks, and not all "
        f"do; gradients {_gradients(group)}",
        fix="communicate the updates in the optimizer's step (`dist.all_reduce(updates)`), or "
        "compute all of them on every rank",
        label="applies updates that differ between ranks",
        evidence={"gradients": _gradients(group)},
    )


def _local_loss(group: Replicas, found: Divergence) -> Cause | None:
    """An optimizer that calls a closure repeatedly within a step (LBFGS)."""
    searches = any(e.backwards > e.count for e in group.any.of(StepDone))
    closure = any(e.closure for e in group.any.of(OptimizerSeen))
    if not (searches and closure and _gradients_agree(group)):
        return None
    return Cause(
        LOCAL_LOSS,
        text="the optimizer's line search uses the loss that the closure returns, and each "
        f"rank returns the loss of its own batch; gradients {_gradients(group)}",
        fix="return the same loss on every rank: in the closure, after `loss.backward()`, "
        "`loss = loss.detach()`, `dist.all_reduce(loss)`, then divide it by the world size",
        label="decides by each rank's own loss",
        evidence={"gradients": _gradients(group)},
    )


def _unknown(group: Replicas, found: Divergence) -> Cause:
    agree, who = _gradients(group), ranks_text(found.minority)
    places = {"step": f"at step {found.first}", "end": AT_THE_END}
    seen = f"first seen {places.get(found.point, AT_EVALUATION)} on {who}"
    cause = causes.unknown(group, found, f"gradients {agree}; {seen}")
    return replace(cause, evidence={"gradients": agree})


def _gradients_agree(group: Replicas) -> bool:
    return divergence(group, "gradients") is None


def _gradients(group: Replicas) -> str:
    """What is known of the gradients, after the word `gradients`."""
    if not _gradients_agree(group):
        return "differ too"
    return "agree at the steps compared" if compared(group, "gradients") else "were not compared"


EXPLANATIONS: tuple[causes.Explanation, ...] = (
    state_loading.weights,
    manual_edits.parameters,
    manual_edits.parameters_earlier,
    manual_edits.before_the_step,
    causes.no_optimizer,
    tensor_writes.after_the_last_step,
    tensor_writes.write_on_some,
    _partial_state,
    _local_loss,
    tensor_writes.own_step,
    _unknown,
)
"""Why parameters differ, in the order in which they are tried: those that name a line come first.
The first that answers names the rule, the ranks, the line, the cause and the fix."""
