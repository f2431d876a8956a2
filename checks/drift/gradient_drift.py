"""DDP401."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddpdoctor.analysis.replicas import causes, manual_edits, state_loading
from ddpdoctor.analysis.replicas.causes import Cause
from ddpdoctor.analysis.replicas.replicas import (
    NO_COPIES,
    ZERO,
    Divergence,
    Replicas,
    compared,
    divergence,
    each_model,
    lacking,
    replicas,
)
from ddpdoctor.analysis.replicas.uncompared import uncompared
from ddpdoctor.report.findings import Check, Finding, Severity
from ddpdoctor.run import Run, ranks_text, some


class GradientDrift(Check):
    """The ranks step with different gradients, although DDP averaged them

    ## What it finds
    Gradients that differ between ranks when the optimizer steps, after a backward that did average
    them: clipped, scaled, noised or cleared on some ranks only, overwritten by hand, or computed
    wrong.

    ## How it knows
    Before each of the first 128 optimizer steps, and then before as many as `--budget` allows (at
    least eight while their number doubles), each rank digests gradients: all of them at steps 0, 1,
    2, 4 and 9, at the others a share that changes from step to step, chosen alike on every rank;
    with `--every N` all of them before every N-th step. The digests of one step are compared
    between the ranks afterwards, to the last bit; where not every rank had looked at what differs
    first, later looks tell who is apart, if they all agree. To tell who edits gradients, and in
    which line, torch's counts of writes to them, and on the CPU six gradients themselves, are
    compared between the backward and the step on each rank, in the first 64 steps and later as the
    budget allows. The finding is proven.

    ## Why it hurts
    DDP keeps the ranks' models equal only by equal gradients. From that step on each rank trains
    another model, while the losses look as usual.

    ## How to fix it
    Whatever changes gradients between `backward` and `step` must run on every rank with the same
    numbers: no `if rank == 0:` around it, no local random noise, no local norm.

    ## When it stays quiet
    Micro-batches under `no_sync` and steps without an averaging backward (those are
    `unsynced-step`); sharded parameters; ranks of different groups; local SGD, where parameters
    are averaged instead.
    """

    code = "DDP401"
    name = "gradient-drift"
    family = "drift"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        groups = replicas(run)
        if not groups:
            return NO_COPIES
        if not any(compared(g, "gradients") for g in groups):
            return "the ranks have no step in common before which averaged gradients were digested"
        return None

    def left_out(self, run: Run) -> str | None:
        return uncompared(run)

    def examine(self, run: Run) -> Iterable[Finding]:
        return each_model(run, self._judge)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "nonfinite-origin":
            return _edited_in(mine, other)
        later = ("parameter-drift", "buffer-drift", "optimizer-state-drift")
        return other.check in later and causes.may_follow(other, mine, 1)

    def _judge(self, run: Run, group: Replicas) -> Iterator[Finding]:
        found = None if group.left_out else divergence(group, "gradients")
        if found is None or _averages_parameters(group):
            return
        cause = _cause(group, found)
        apart, since = _size(group, found, cause)
        yield self.finding(
            **causes.reported(group, found, cause),
            summary=f"gradients of {some(found.names)} differ "
            f"{causes.between(found.split, run)}{apart} when the optimizer steps, "
            f"first {'seen ' * bool(found.unseen)}at step {found.first}{since}",
            evidence=causes.evidence(group, found) | cause.evidence,
        )


def _edited_in(mine: Finding, other: Finding) -> bool:
    """Whether what is not finite came with gradients that the same ranks edited, and only they have
    it: averaging would have given it to all."""
    if other.evidence.get("brought by a gradient of step", "") == "" or other.steps is None:
        return False
    ranks = mine.evidence.get("edited_by_hand_on")
    within = mine.steps is None or mine.steps.first <= other.steps.first <= mine.steps.last
    same = isinstance(ranks, list) and {*other.ranks} <= {*ranks}
    return (
        within
        and same
        and bool(other.evidence.get("finite on"))
        and bool({*other.subjects} & {*mine.subjects})
    )


def _averages_parameters(group: Replicas) -> bool:
    """Local SGD: the parameters part and come together again, with nothing loaded meanwhile."""
    parameters = divergence(group, "parameters")
    if parameters is None or parameters.healed < 0:
        return False
    return not state_loading.reloads(group, "weights", parameters.at)


def _cause(group: Replicas, found: Divergence) -> Cause:
    if ranks := lacking(group, found):
        return _lacks(group, found, ranks)
    if ranks := lacking(group, found, ZERO):
        return _zeroes(group, found, ranks)
    cause = manual_edits.edited(group, "gradients", found) or manual_edits.clipped(group)
    if cause is None:
        hook = group.any.seen.hook
        seen = f"the communication hook {hook} made them" if hook else "DDP averaged them"
        seen += ", and no edit by hand was seen on any rank, where not all of them are looked at "
        seen += "for that in every step"
        cause = causes.unknown(group, found, seen)
    elif len(cause.ranks) < len(group.members) and not cause.everybody:
        return cause
    return _of_other_parameters(group, found, cause)


def _lacks(group: Replicas, found: Divergence, ranks: tuple[int, ...]) -> Cause:
    """These ranks step without gradients that the others have, equal ones."""
    spot = manual_edits.own_line(group, "gradients", found.first, ranks)
    verb = "has" if len(ranks) == 1 else "have"
    where = "here, " * (spot is not None)
    return Cause(
        text=f"{ranks_text(ranks)} {verb} no gradient of them when the optimizer steps, the others "
        f"have what DDP averaged: it is cleared (`p.grad = None`) {where}after the backward",
        fix="clear it on every rank, or on none",
        label=f"on {ranks_text(ranks)} only" if spot else "steps without some gradients",
        location=spot,
        ranks=ranks,
        evidence={"no_gradient_on": list(ranks)},
    )


def _zeroes(group: Replicas, found: Divergence, ranks: tuple[int, ...]) -> Cause:
    """These ranks step with zeros where the others have gradients, equal ones."""
    spot = manual_edits.own_line(group, "gradients", found.first, ranks)
    verb = "has" if len(ranks) == 1 else "have"
    return Cause(
        text=f"{ranks_text(ranks)} {verb} nothing but zeros in them when the optimizer steps, the "
        f"others what DDP averaged: it is zeroed {'here, ' * (spot is not None)}after the backward"
        + ("" if spot else ", by which line is not known (`zero_()`, a product with 0)"),
        fix="zero it on every rank, or on none: look for code under `if rank == ...`, or under a "
        "condition on the rank's own data, between `backward` and `step`",
        label=f"on {ranks_text(ranks)} only" if spot else "steps with zeros for gradients",
        location=spot,
        ranks=ranks,
        evidence={"zeros_on": list(ranks)},
    )


def _size(group: Replicas, found: Divergence, cause: Cause) -> tuple[str, str]:
    """By how much they differ; or else how far the parameters are apart since."""
    if size := causes.largest(group, found):
        return size, ""
    if "zeros_on" in cause.evidence:
        return " by all of their norm", ""
    parameters = divergence(group, "parameters")
    if parameters is None or parameters.first <= found.first:
        return "", ""
    size = causes.largest(group, parameters)
    return "", f"; the parameters are apart{size} since" if size else ""


def _of_other_parameters(group: Replicas, found: Divergence, cause: Cause) -> Cause:
    """What every rank computes from its parameters differs where those do."""
    parameters = divergence(group, "parameters")
    if parameters is None or parameters.first > found.before + 1:
        return cause
    return replace(
        cause,
        text=f"the parameters differ since step {parameters.first}, and what is computed from them "
        f"with them; {cause.text}",
        evidence=cause.evidence | {"parameters_differ_since_step": parameters.first},
    )
