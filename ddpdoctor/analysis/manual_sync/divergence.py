"""Whole copies without a wrapper that were kept equal by gradients which the program synchronises
manually (its own all-reduce), and diverge: the record and its rows of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...report.findings import Confidence, Evidence, Severity, Steps
from ...run import Location, equal_ranks, odd_ones, plural, ranks_text
from ..replicas import optimizer_options
from .cases import Case, Rule, Text
from .copies import Rows, step_of

Options = tuple[int, str, str]
"""A step, an option that differs between ranks at it, and its values, as text."""


@dataclass(frozen=True)
class SkippedSteps:
    """Ranks that take a step after more all-reduces of gradients than others.

    Attributes:
        step: the first such step that was examined; -1 where only the end tells.
        elements: by rank, the elements communicated before it, but for those of the first step.
        taken: by rank, all steps in the end, where that is on record.
    """

    ranks: tuple[int, ...]
    step: int
    elements: dict[int, int]
    taken: dict[int, int]


@dataclass(frozen=True)
class Divergence(Case):
    """Where copies diverge: they are equal at the look `equal` and at none from `look` on.

    Attributes:
        missing: by rank, how many steps between the two were not synchronised.
        gradients: whether the gradients applied agree: `agree`, `differ` or `not known`.
        stopped: none of the steps after `equal` was synchronised.
        once: of the steps before `equal`, only the first one was.
        other_group: the ranks of another group that synchronises every step, where only that shows
            that the difference is not intended.
        ahead: the ranks that skipped steps whose gradients all ranks synchronised.
        options: the first step in between that the ranks took with different options.
        likewise: ranks of other groups that diverge in the same steps of the same line.
    """

    equal: Rows = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    gradients: str = "not known"
    stopped: bool = False
    once: bool = False
    suspected: bool = False
    other_group: tuple[int, ...] = ()
    ahead: SkippedSteps | None = None
    options: Options | None = None
    likewise: tuple[int, ...] = ()

    @property
    def window(self) -> tuple[int, int]:
        """The step before which they were last equal, and the first before which they differ."""
        return step_of(self.equal), self.begin

    @property
    def over(self) -> bool:
        """Whether they are known to differ only since the run was over."""
        return self.look is self.copies.end

    @property
    def minority(self) -> tuple[int, ...]:
        if self.ahead:
            return self.ahead.ranks
        return odd_ones(equal_ranks({n: s.parameters for n, s in self.look.items()}))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted((*self.minority, *self.likewise)))

    @property
    def steps(self) -> Steps | None:
        if self.over or (self.ahead and self.ahead.step < 0):
            return None
        end = self.copies.end
        last = step_of(end) - 1 if end else max(self.begin, step_of(self.copies.looks[-1]))
        return Steps(self.begin, last, last - self.begin + 1)

    def spot(self, name: str) -> Location | None:
        rank, event = self.copies.first
        if name == "option":
            if self.options is None:
                return None
            step, option, _ = self.options
            return optimizer_options.set_at(rank, event.optimizer, option, step)
        if name == "exchange":  # the synchronisation that stopped
            looks = (look[rank.rank] for look in reversed(self.copies.looks) if self.stopped)
            spots = (rank.location(state.exchange_site) for state in looks if state.complete)
            return next((spot for spot in spots if spot is not None), None)
        return super().spot(name)


def _row(
    name: str,
    when: str,
    cause: Callable[[Divergence], str],
    fix: Text,
    *,
    label: str = "",
    summary: Callable[[Divergence], str] | None = None,
    evidence: Callable[[Divergence], Evidence] | None = None,
) -> Rule:
    def equal_before(case: Divergence) -> str:
        equal, differ = case.window
        end = "after the last step" if case.over else f"before step {differ}"
        return f"the parameters were equal before step {equal} and differed {end}: {cause(case)}"

    def also(case: Divergence) -> str:
        others = f"; likewise {ranks_text(case.likewise)} in other groups"
        return (summary or _summary)(case) + (others if case.likewise else "")

    return Rule(
        name=name,
        when=when,
        severity=lambda c: Severity.NOTE if c.over else Severity.ERROR,
        confidence=lambda c: Confidence.SUSPECTED if c.suspected else Confidence.PROVEN,
        label=label,
        related=(
            (lambda c: f"sets {c.options[1]}", "option"),
            ("all-reduced here before", "exchange"),
            ("created here", "made"),
        ),
        summary=also,
        cause=cause if summary else equal_before,
        fix=fix,
        evidence=lambda c: {
            "last_equal_at_step": c.window[0],
            **(evidence or _evidence)(c),
            "comparisons": len(c.copies.looks),
        },
    )


def _summary(case: Divergence) -> str:
    minority, everyone = case.minority, len(case.copies.members)
    if len(minority) == everyone:
        where = "between " + (ranks_text(minority) if case.copies.part else "all ranks")
    else:
        where = (
            f"on {ranks_text(minority)} from the other ranks" + " of the group" * case.copies.part
        )
    when = "at the end of the run" if case.over else f"from step {case.begin} on"
    return (
        f"parameters of {case.kind} differ {where} {when}, although the program synchronises their "
        "gradients manually"
    )


def _evidence(case: Divergence) -> Evidence:
    return {
        "first_different_at_step": case.begin,
        "steps_in_between_not_synchronised": [
            {"rank": n, "steps": count} for n, count in case.missing.items() if count
        ],
        "gradients": case.gradients,
    }


def _in_steps(case: Divergence) -> str:
    begin, end = case.window
    return f"step {begin}" if end == begin + 1 else f"a step from {begin} to {end - 1}"


def _not_synced(case: Divergence) -> str:
    missing = tuple(n for n, count in case.missing.items() if count)
    who = f"{ranks_text(missing)} {plural(len(missing), 'does', 'do')} not, and each rank"
    if len(missing) == len(case.copies.members):
        who = "no rank does, and each"
    since = f"from step {case.window[0]} on" if case.stopped else f"in {_in_steps(case)}"
    others = f"; {ranks_text(case.other_group)} still synchronise theirs"
    return (
        f"in {'step 0' if case.once else 'earlier steps'} every rank"
        f"{' of the group' * case.copies.part} passed all gradients to a collective; {since} {who} "
        f"applies its own{others if case.other_group else ''}"
    )


def _unequal_options(case: Divergence) -> str:
    assert case.options is not None
    step, option, values = case.options
    return f"the ranks take step {step} with different options, {option} is {values}"


def _edited(case: Divergence) -> str:
    if case.gradients == "differ":
        steps = _in_steps(case)
        return f"the gradients applied in {steps} differ between ranks, although all-reduced"
    begin, end = case.window
    return (
        f"all gradients of steps {begin} to {end - 1} are all-reduced, so a rank modifies its "
        "parameters there, or its gradients after the all-reduce"
    )


def _who_skipped(case: Divergence) -> str:
    skipped = case.ahead
    assert skipped is not None
    who = ranks_text(skipped.ranks)
    if skipped.step >= 0:
        return (
            f"{who} skipped an optimizer step of {case.kind}: step {skipped.step} follows more "
            "all-reduces of gradients there than on the other ranks"
        )
    least, most = min(skipped.taken.values()), max(skipped.taken.values())
    return (
        f"{who} took {least} optimizer steps of {case.kind} for as many all-reduces of gradients "
        f"as the other ranks, which took {most}"
    )


def _communicated(case: Divergence) -> Evidence:
    skipped = case.ahead
    assert skipped is not None
    taken = {n: {"steps": count} for n, count in skipped.taken.items()}
    return {
        "communicated" + ("" if skipped.step < 0 else "_before_the_step"): [
            {"rank": n, "elements": count, **taken.get(n, {})}
            for n, count in skipped.elements.items()
        ]
    }


SYNC_EVERY_STEP = "all-reduce the gradients before every `optimizer.step()`"
NOT_SYNCED = "applies gradients that are not synchronised"
SAME_EDITS = (
    "modify parameters and gradients on every rank with the same values, or broadcast them from "
    "one rank afterwards"
)

SYNC_STOPPED = _row(
    "sync-stopped",
    "manual synchronisation of gradients stops at some step",
    _not_synced,
    SYNC_EVERY_STEP,
    label=NOT_SYNCED,
)
STEP_NOT_SYNCED = _row(
    "step-not-synced",
    "manual synchronisation of gradients is missing at some step",
    _not_synced,
    f"{SYNC_EVERY_STEP}, also those of the last, shorter group of micro-batches",
    label=NOT_SYNCED,
)
SKIPPED = _row(
    "skipped-step-manual-sync",
    "some ranks skip a step whose gradients were synchronised manually",
    lambda c: (
        "all ranks synchronised the gradients manually, but not all of them applied them: "
        "the parameters differ by the missing updates"
    ),
    "take the step on every rank; if a step is to be skipped, decide it from values that are equal "
    "on all ranks (all-reduce the condition)",
    label="skipped at least once, on some ranks only",
    summary=_who_skipped,
    evidence=_communicated,
)
UNEQUAL_OPTIONS = _row(
    "unequal-options",
    "the ranks apply synchronised gradients with different optimizer options",
    _unequal_options,
    lambda c: (
        f"set `{c.options[1]}` to the same value on every rank before the same step: end "
        "inner loops on all ranks together (all-reduce the condition), step schedulers on all ranks"
    ),
)
UNEQUAL_UPDATES = _row(
    "unequal-updates",
    "the ranks apply different updates, although synchronised gradients agree",
    lambda c: (
        f"the gradients of {_in_steps(c)} are all-reduced and agree, so a rank modifies its "
        "parameters there, or applies a different update"
    ),
    SAME_EDITS,
)
EDIT_AFTER_SYNC = _row(
    "edit-after-sync",
    "gradients or parameters are modified after manual synchronisation",
    _edited,
    SAME_EDITS,
)
