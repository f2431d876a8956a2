"""The whole model: copies that were kept equal by gradients which the program synchronises manually
(its own all-reduce), and diverge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...report.findings import Confidence, Severity, Steps
from ...run import Location, equal_ranks, odd_ones, plural, ranks_text
from ..replicas import optimizer_options
from . import rules
from .cases import Case
from .copies import Copies, Rows, agree, moved, parting, same, step_of
from .thresholds import ENOUGH, LOOKS_SINCE_ONCE

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
        suspected: the difference may be intended.
        going_on: the ranks of another group that synchronises every step, where only that shows
            that it is not.
        ahead: the ranks that skipped steps whose gradients all ranks synchronised.
        options: the first step in between that the ranks took with different options.
    """

    equal: Rows = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    gradients: str = "not known"
    stopped: bool = False
    once: bool = False
    suspected: bool = False
    going_on: tuple[int, ...] = ()
    ahead: SkippedSteps | None = None
    options: Options | None = None

    @property
    def over(self) -> bool:
        """Whether they are known to differ only since the run was over."""
        return self.look is self.copies.end

    @property
    def severity(self) -> Severity:
        return Severity.NOTE if self.over else Severity.ERROR

    @property
    def confidence(self) -> Confidence:
        return Confidence.SUSPECTED if self.suspected else Confidence.PROVEN

    @property
    def ranks(self) -> tuple[int, ...]:
        if self.ahead:
            return self.ahead.ranks
        return odd_ones(equal_ranks({n: s.parameters for n, s in self.look.items()}))

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
        if name == "last exchange":
            looks = (look[rank.rank] for look in reversed(self.copies.looks) if self.stopped)
            spots = (rank.location(state.exchange_site) for state in looks if state.complete)
            return next((spot for spot in spots if spot is not None), None)
        return super().spot(name)

    # Values for the texts.

    @property
    def window(self) -> tuple[int, int]:
        """The step before which they were last equal, and the first before which they differ."""
        return step_of(self.equal), self.begin

    @property
    def in_between(self) -> str:
        begin, end = self.window
        return f"step {begin}" if end == begin + 1 else f"a step from {begin} to {end - 1}"

    @property
    def last_before(self) -> int:
        return self.begin - 1

    @property
    def between(self) -> str:
        """`between all ranks`, `on rank 1 from the other ranks`."""
        who, part = self.ranks, self.copies.part
        if len(who) < len(self.copies.members):
            return f"on {self.who} from the other ranks{self.of_the_group}"
        return f"between {self.who if part else 'all ranks'}"

    @property
    def from_when(self) -> str:
        return "at the end of the run" if self.over else f"from step {self.begin} on"

    @property
    def by_when(self) -> str:
        return "after the last step" if self.over else f"before step {self.begin}"

    @property
    def of_the_group(self) -> str:
        return " of the group" * self.copies.part

    @property
    def earlier(self) -> str:
        return "step 0" if self.once else "earlier steps"

    @property
    def lacking(self) -> str:
        """`from step 8 on no rank does, and each`: who does not synchronise, and since when."""
        missing = tuple(n for n, count in self.missing.items() if count)
        who = f"{ranks_text(missing)} {plural(len(missing), 'does', 'do')} not, and each rank"
        if len(missing) == len(self.copies.members):
            who = "no rank does, and each"
        return (
            f"{f'from step {self.window[0]} on' if self.stopped else f'in {self.in_between}'} {who}"
        )

    @property
    def others_go_on(self) -> str:
        return ranks_text(self.going_on)

    @property
    def communicated(self) -> list[dict[str, int]]:
        assert self.ahead is not None
        taken = {n: {"steps": count} for n, count in self.ahead.taken.items()}
        elements = self.ahead.elements.items()
        return [{"rank": n, "elements": count, **taken.get(n, {})} for n, count in elements]

    @property
    def taken(self) -> tuple[int, int]:
        """The fewest steps that a rank took, and the most."""
        assert self.ahead is not None
        return min(self.ahead.taken.values()), max(self.ahead.taken.values())


def once_kept_equal(copies: Copies, every: list[Copies]) -> Case | None:
    """Copies that manual synchronisation kept equal diverge, unless that may be intended."""
    if not copies.kept_equal:
        return None
    every_look = [*copies.looks, *([copies.end] if copies.end else [])]
    first = next((i for i, look in enumerate(every_look) if not same(look)), None)
    if first is None and (late := _fewer_in_the_end(copies)):
        return _divergence(copies, every_look[-1], copies.ends, ahead=late)
    if not first or any(map(same, every_look[first:])):
        return None
    equal, differ, last = every_look[first - 1], every_look[first], every_look[-1]
    if (skipped := _skipped(copies, equal, differ)) is not None:
        return _divergence(copies, equal, differ, ahead=skipped)
    if any(s.averaged != equal[n].averaged for n, s in last.items()):
        return None  # the parameters themselves are communicated: local SGD, or a repair
    steps = step_of(differ) - step_of(equal)
    missing = {n: steps - (s.completed - equal[n].completed) for n, s in differ.items()}
    silent = last is not differ and _stopped(differ, last)
    found = _divergence(
        copies, equal, differ, missing=missing, gradients=_agreement(copies, equal, differ),
        stopped=silent and all(count == steps for count in missing.values()),
    )  # fmt: skip
    if differ is copies.end:
        # After the run, a rank may load another model to look at it: only a step that was not
        # synchronised shows a fault.
        return found if any(missing.values()) and _mostly(copies.looks[0], equal) else None
    if not silent:
        return found if _mostly(differ, last) else None
    if _mostly(copies.looks[0], last):
        return found
    if not _little(copies, differ, last):
        return None
    goes_on = (c for c in every if _always(c) and step_of(c.last) == step_of(last))
    apart = (c for c in goes_on if c.members.keys().isdisjoint(copies.members))
    if (other := next(apart, None)) is not None:
        return replace(
            found, suspected=True, going_on=tuple(other.members), remarks=(rules.OTHER_GROUP,)
        )
    return replace(found, suspected=True) if _went_apart(copies, found) else None


UPDATES = {
    "agree": rules.UNEQUAL_UPDATES,
    "differ": rules.GRADIENTS_EDITED,
    "not known": rules.EDIT_AFTER_SYNC,
}
"""Why copies diverge although all synchronise, by `Divergence.gradients`."""


def _divergence(
    copies: Copies,
    equal: Rows,
    differ: Rows,
    *,
    missing: dict[int, int] | None = None,
    gradients: str = "not known",
    stopped: bool = False,
    once: bool = False,
    ahead: SkippedSteps | None = None,
) -> Divergence:
    """A divergence, with the rule that says why."""
    options = _other_options(copies, step_of(equal), step_of(differ))
    if ahead:
        rule = rules.SKIPPED if ahead.step >= 0 else rules.FEWER_IN_THE_END
    elif missing and any(missing.values()):
        rule = rules.SYNC_STOPPED if stopped else rules.STEP_NOT_SYNCED
    elif options is not None:
        rule = rules.UNEQUAL_OPTIONS
    else:
        rule = UPDATES[gradients]
    return Divergence(
        rule, copies, differ, range(len(copies.names)), equal=equal, missing=missing or {},
        gradients=gradients, stopped=stopped, once=once, suspected=once, ahead=ahead,
        options=options,
    )  # fmt: skip


def synced_once(copies: Copies, every: list[Copies]) -> Case | None:
    """The copies diverge because only the first step was synchronised, and so little was
    communicated since that nothing else can be meant to keep them equal."""
    if len(copies.looks) < LOOKS_SINCE_ONCE:
        return None
    first, equal, *later = copies.looks
    last = copies.end or later[-1]
    if (step_of(first), step_of(equal)) != (0, 1) or not moved(first, equal):
        return None
    if parting(map(same, (*copies.looks, last))) != 2 or not _little(copies, None, last):
        return None
    if not agree(first) or any(map(agree, copies.looks[1:])):
        return None
    for n, s in last.items():
        more = s.late or s.running or s.averaged != equal[n].averaged
        if more or not s.completed + s.inside == equal[n].completed + equal[n].inside == 1:
            return None
    missing = {n: step_of(later[0]) - 1 for n in copies.members}
    return _divergence(
        copies, equal, later[0], missing=missing, gradients="differ", stopped=True, once=True
    )


def _always(copies: Copies) -> bool:
    """Whether a group kept its copies equal by the gradients of every step."""
    return (
        copies.part
        and copies.kept_equal
        and all(s.completed + s.complete == s.step + (not s.last) for s in copies.last.values())
    )


def _went_apart(copies: Copies, found: Divergence) -> bool:
    """Whether all gradients of every step were synchronised up to the divergence, of more than one
    step, and the gradients differ at each look since, up to an end that is on record."""
    begin, end = found.window
    later = [look for look in copies.looks if step_of(look) >= end]
    return (
        found.stopped
        and copies.end is not None
        and begin > 1
        and all(s.completed == begin for s in found.equal.values())
        and not any(map(agree, later))
    )


def _little(copies: Copies, first: Rows | None, last: Rows) -> bool:
    """Whether less is communicated between these looks (without `first`: since the first step) than
    it takes to make the parameters equal once."""
    return all(
        s.elements - (first[n].elements if first else 0) < ENOUGH * copies.size
        for n, s in last.items()
    )


def _mostly(first: Rows, last: Rows) -> bool:
    """Whether every rank synchronised more than half of the steps between these looks."""
    return all(
        2 * (s.completed + s.complete - first[n].completed) > s.step + (not s.last) - first[n].step
        for n, s in last.items()
    )


def _stopped(first: Rows, last: Rows) -> bool:
    """Whether no rank synchronised any step between these looks, nor used other communication."""
    return not any(
        s.complete or s.completed > first[n].completed or s.exchanged != "gradients"
        for n, s in last.items()
    )


def _agreement(copies: Copies, equal: Rows, differ: Rows) -> str:
    """Whether the gradients between two looks agree: see `Divergence.gradients`."""
    begin, end = step_of(equal), step_of(differ)
    between = [look for look in copies.looks if begin <= step_of(look) < end]
    if not all(map(agree, between)):
        return "differ"
    return "agree" if len(between) == end - begin else "not known"


def _other_options(copies: Copies, begin: int, end: int) -> Options | None:
    """The first step in between that the ranks took with different options."""
    tables = {n: optimizer_options.by_step(r, e.optimizer) for n, (r, e) in copies.members.items()}
    step = next((s for s in optimizer_options.skewed(tables, end - 1) if begin <= s), None)
    if step is None:
        return None
    values = {n: optimizer_options.at(table, step) for n, table in tables.items()}
    values = optimizer_options.settled(values)
    option, group = optimizer_options.options(values)[0]
    shown = {n: groups[group].get(option) for n, groups in values.items()}
    return step, option, optimizer_options.spelled(shown)


def _skipped(copies: Copies, equal: Rows, differ: Rows) -> SkippedSteps | None:
    """The ranks that have communicated at least the gradients of one more step than others where
    the copies diverge, and ever since; None where the ranks have not communicated equally much in
    the end, as they must, since collectives pair. On the ranks that skip, `averaged` counts what
    is communicated then as parameters."""
    looks, ends, size = copies.looks, copies.ends, copies.size
    whole = ends.keys() == copies.members.keys()
    if whole and max(_more(ends).values()) >= size:
        return None
    more = [_more(look) for look in looks]
    first = next((i for i, extra in enumerate(more) if max(extra.values()) >= size), None)
    if not first or step_of(looks[first]) not in (step_of(equal), step_of(differ)):
        return None
    ranks = tuple(n for n, extra in more[first].items() if extra >= size)
    if any(later[n] < size for later in more[first:] for n in ranks):
        return None
    if any(s.averaged != equal[n].averaged for n, s in differ.items() if n not in ranks):
        return None
    elements = {n: s.elements for n, s in looks[first].items()}
    taken = {n: s.step for n, s in ends.items()} if whole else {}
    return SkippedSteps(ranks, step_of(looks[first]), elements, taken)


def _fewer_in_the_end(copies: Copies) -> SkippedSteps | None:
    """The ranks that took fewer steps in the end and have different parameters, where all ranks
    have communicated equally much, the gradients of every step included."""
    looks, ends = copies.looks, copies.ends
    if not looks or ends.keys() != copies.members.keys() or same(ends):
        return None
    most = max(s.step for s in ends.values())
    ranks = tuple(n for n, s in ends.items() if s.step < most)
    if any(max(_more(look).values()) >= copies.size for look in (looks[-1], ends)):
        return None
    if any(s.completed < s.step for s in ends.values()) or not ranks:
        return None
    elements = {n: s.elements for n, s in ends.items()}
    return SkippedSteps(ranks, -1, elements, {n: s.step for n, s in ends.items()})


def _more(look: Rows) -> dict[int, int]:
    """By rank, how many elements more it has communicated than the rank with the fewest."""
    least = min(s.elements for s in look.values())
    return {n: s.elements - least for n, s in look.items()}
