"""DDP401."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ddpdoctor.analysis.replicas import causes, manual_edits, state_loading
from ddpdoctor.analysis.replicas.causes import UNEQUAL_PARAMETERS, Cause
from ddpdoctor.analysis.replicas.group_findings import MODIFIED_ON, NO_GRADIENT_ON, ZEROS_ON
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    Divergence,
    Replicas,
    compared,
    divergence,
    each_model,
    lacking,
    replicas,
)
from ddpdoctor.analysis.replicas.uncompared import uncompared
from ddpdoctor.events.drift import ZERO
from ddpdoctor.report.declarations import Condition, Effect
from ddpdoctor.report.evidence_names import FINITE_ON
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, ranks_do, some

CLEARED = "cleared-on-some-ranks"
ZEROED = "zeroed-on-some-ranks"


def _brought(mine: Finding, other: Finding) -> bool:
    """Whether NaN or infinity came with gradients that the same ranks modified, and only these
    ranks have it: DDP's average would have spread it to all."""
    if other.steps is None:
        return False
    ranks = mine.evidence.get(MODIFIED_ON)
    within = mine.steps is None or mine.steps.first <= other.steps.first <= mine.steps.last
    same = isinstance(ranks, list) and {*other.ranks} <= {*ranks}
    return (
        within
        and same
        and bool(other.evidence.get(FINITE_ON))
        and bool({*other.subjects} & {*mine.subjects})
    )


class GradientDrift(Check):
    """Gradients differ between ranks at the optimizer step, although DDP averaged them

    ## What it finds
    Gradients that differ between ranks when the optimizer steps, after a synchronised backward:
    clipped, scaled, noised, zeroed or set to None on some ranks only, overwritten, or computed
    wrong.

    ## How it knows
    Each rank records digests (checksums) of its gradients before each of the first 128 optimizer
    steps, then as often as `--budget` allows (at least eight times while the number of steps
    doubles): all gradients at steps 0, 1, 2, 4 and 9, at other steps a changing share that is the
    same on every rank; with `--every N` all of them before every N-th step. The digests of a step
    are compared afterwards, bit for bit. If not every rank examined what differs first, later
    comparisons decide which ranks differ, provided they agree. To find who modifies gradients, and
    where, each rank compares torch's write counters, and on the CPU the values of six gradients,
    between backward and step; in the first 64 steps and later as the budget allows. A difference
    proves the fault.

    ## Why it hurts
    DDP keeps replicas identical only by identical gradients. From that step on each rank trains a
    different model, while the losses look normal.

    ## How to fix it
    Whatever changes gradients between `backward` and `step` must run on every rank with the same
    values: not under `if rank == 0:`, without rank-local noise or a rank-local norm.

    ## When it stays quiet
    - Micro-batches under `no_sync`, and steps without a synchronised backward (see
      `unsynced-step`).
    - Sharded parameters, and ranks of different groups.
    - Local SGD, where parameters are averaged instead.
    """

    code = "DDP401"
    name = "gradient-drift"
    family = "drift"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        CLEARED: "some ranks step without gradients that the others have",
        ZEROED: "some ranks step with zeros where the others have gradients",
        **manual_edits.GRADIENT_RULES,
        UNEQUAL_PARAMETERS: "the parameters differed first, and so does what they are used for",
        **causes.UNKNOWN_RULES,
    }
    effects = (
        Effect(
            ("nonfinite-origin",),
            rules=("gradient-of-earlier-step",),
            when=(Condition("of gradients that these ranks modified", _brought),),
        ),
        Effect(
            ("parameter-drift", "buffer-drift", "optimizer-state-drift"),
            when=(causes.IN_A_LATER_STEP,),
        ),
    )

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if not groups:
            return NO_COPIES
        if not any(compared(g, "gradients") for g in groups):
            return "there is no step before which averaged gradients of two ranks were examined"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        return each_model(run, self._judge)

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        found = None if group.left_out else divergence(group, "gradients")
        parameters = divergence(group, "parameters")
        if found is None or (parameters and state_loading.equal_again(group, parameters)):
            return
        cause = causes.explained(EXPLANATIONS, group, found)
        size, since = _size(group, found, cause)
        yield self.finding(
            **causes.fields(group, found, cause),
            summary=f"gradients of {some(found.names)} differ "
            f"{causes.between(found.split, run)}{size} when the optimizer steps, "
            f"first {'seen ' * bool(found.unseen)}at step {found.first}{since}",
            evidence=causes.evidence(group, found) | cause.evidence,
        )


def _cleared(group: Replicas, found: Divergence) -> Cause | None:
    """Some ranks step without gradients that the others have and agree on."""
    if not (ranks := lacking(group, found)):
        return None
    spot = manual_edits.own_line(group, "gradients", found.first, ranks)
    return Cause(
        CLEARED,
        text=f"{ranks_do(ranks, 'step')} without these gradients: they are set to None after "
        f"backward{', at this line' * (spot is not None)}. The other ranks apply DDP's average",
        fix="set them to None on every rank, or on none",
        label=f"{'sets gradients to None' if spot else 'lacks some gradients,'} on some ranks only",
        location=spot,
        ranks=ranks,
        evidence={NO_GRADIENT_ON: list(ranks)},
    )


def _zeroed(group: Replicas, found: Divergence) -> Cause | None:
    """Some ranks step with zeros where the others have gradients and agree on them."""
    if not (ranks := lacking(group, found, ZERO)):
        return None
    spot = manual_edits.own_line(group, "gradients", found.first, ranks)
    where = "at this line" if spot else "at a line not known (`zero_()`, a product with 0)"
    return Cause(
        ZEROED,
        text=f"{ranks_do(ranks, 'step')} with zeros in place of these gradients: they are zeroed "
        f"after backward, {where}. The other ranks apply DDP's average",
        fix="zero them on every rank, or on none: between `backward` and `step`, look for code "
        "under `if rank == ...` or under a condition on the rank's own data",
        label=f"{'zeroes gradients' if spot else 'steps with zeros for gradients,'} on some ranks "
        "only",
        location=spot,
        ranks=ranks,
        evidence={ZEROS_ON: list(ranks)},
    )


def _edit(group: Replicas, found: Divergence) -> Cause | None:
    """Any modification of gradients, not the same on all ranks."""
    return manual_edits.edited(group, "gradients", found) or manual_edits.clipped(group)


def _edit_on_some(group: Replicas, found: Divergence) -> Cause | None:
    cause = _edit(group, found)
    if cause is None or cause.everybody or len(cause.ranks) == len(group.members):
        return None
    return cause


def _unequal_parameters(group: Replicas, found: Divergence) -> Cause | None:
    """The parameters differed before: then so does what is computed from them."""
    parameters = divergence(group, "parameters")
    if parameters is None or parameters.first > found.before + 1:
        return None
    cause = _edit(group, found) or _unknown(group, found)
    return replace(
        cause,
        rule=UNEQUAL_PARAMETERS,
        text=f"the parameters differ since step {parameters.first}, and so does what is computed "
        f"from them; {cause.text}",
        evidence=cause.evidence | {"parameters_differ_since_step": parameters.first},
    )


def _unknown(group: Replicas, found: Divergence) -> Cause:
    hook = group.any.seen.hook
    seen = f"the communication hook {hook} computed them" if hook else "DDP averaged them"
    seen += ", and no manual modification was seen on any rank (not every gradient is examined "
    seen += "for that in every step)"
    return causes.unknown(group, found, seen)


EXPLANATIONS: tuple[causes.Explanation, ...] = (
    _cleared,
    _zeroed,
    _edit_on_some,
    _unequal_parameters,
    _edit,
    _unknown,
)
"""Why gradients differ, in the order in which they are tried. What all ranks modify comes after
parameters that differ, since it may be the same modification with different values."""


def _size(group: Replicas, found: Divergence, cause: Cause) -> tuple[str, str]:
    """By how much the gradients differ; where not known, by how much the parameters differ since.
    Two ends of phrases, of which at least one is empty."""
    if size := causes.by_how_much(group, found):
        return size, ""
    if cause.rule == ZEROED:
        return " by 100 % of their norm", ""
    parameters = divergence(group, "parameters")
    if parameters is None or parameters.first <= found.first:
        return "", ""
    size = causes.by_how_much(group, parameters)
    return "", f"; since then the parameters differ{size}" if size else ""
