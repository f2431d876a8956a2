"""Copies without a wrapper that are kept equal by gradients that the program synchronises manually
(its own all-reduce), and diverge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...events import UnwrappedState
from ...report.findings import Confidence, FixKind, Related, Severity, Steps
from ...run import Location, Run, equal_ranks, odd_ones, plural, ranks_text
from ..replicas import optimizer_options
from . import skipped_steps
from .copies import Copies, Rows, same, step_of, trained_copies
from .skipped_steps import SkippedSteps, ahead, in_the_end

SYNC_STOPPED = "sync-stopped"
STEP_NOT_SYNCED = "step-not-synced"
UNEQUAL_OPTIONS = "unequal-options"
UNEQUAL_UPDATES = "unequal-updates"
EDIT_AFTER_SYNC = "edit-after-sync"

RULES = {
    SYNC_STOPPED: "manual synchronisation of gradients stops at some step",
    STEP_NOT_SYNCED: "manual synchronisation of gradients is missing at some step",
    skipped_steps.SKIPPED: "some ranks skip a step whose gradients were synchronised manually",
    UNEQUAL_OPTIONS: "the ranks apply synchronised gradients with different optimizer options",
    UNEQUAL_UPDATES: "the ranks apply different updates, although synchronised gradients agree",
    EDIT_AFTER_SYNC: "gradients or parameters are modified after manual synchronisation",
}

LOOKS_AT_LEAST = 5
"""Looks that are required where only the first step is synchronised."""

ENOUGH = 0.5
"""Share of the parameters' elements that must be communicated to make them equal."""


@dataclass(frozen=True)
class ReplicaDivergence:
    """Where copies diverge: they are equal at the look `equal` and at none from `differ` on.

    Attributes:
        missing: by rank, how many steps between the two were not synchronised.
        gradients: whether the gradients applied agree: `agree`, `differ` or `not known`.
        stopped: none of the steps after `equal` was synchronised.
        once: of the steps before `equal`, only the first one was.
        early: all steps before `equal` were, which are no more than half of the run.
        other_group: the ranks of another group that synchronises every step, where only that shows
            that the difference is not intended.
        ahead: the ranks that skipped steps whose gradients all ranks synchronised.
    """

    copies: Copies
    equal: Rows
    differ: Rows
    missing: dict[int, int]
    gradients: str
    stopped: bool = False
    once: bool = False
    early: bool = False
    other_group: tuple[int, ...] = ()
    ahead: SkippedSteps | None = None

    @property
    def steps(self) -> tuple[int, int]:
        return step_of(self.equal), step_of(self.differ)


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(kept_equal(c) or _synced_once(c) for c in trained_copies(run))


def divergences(run: Run) -> Iterator[ReplicaDivergence]:
    """Where copies diverge that were kept equal before."""
    every = list(trained_copies(run))
    steady = [c for c in every if c.part and kept_equal(c) and _always(c)]
    for copies in every:
        found = _divergence(copies, steady) if kept_equal(copies) else None
        if (found := found or _synced_once(copies)) is not None:
            yield found


def kept_equal(copies: Copies) -> bool:
    """Whether manual synchronisation was seen to work: every rank passed all gradients of all steps
    between two looks to collectives, and the parameters moved and were equal at both."""
    for before, after in zip(copies.looks, copies.looks[1:], strict=False):
        if not (same(before) and same(after)):
            return False
        steps = step_of(after) - step_of(before)
        whole = all(s.completed - before[n].completed == steps for n, s in after.items())
        if whole and _moved(before, after):
            return True
    return False


def _moved(before: Rows, after: Rows) -> bool:
    return all(s.parameters != before[n].parameters for n, s in after.items())


def _always(copies: Copies) -> bool:
    """Whether all gradients of every step were synchronised."""
    return all(s.completed + s.complete == s.step + (not s.last) for s in copies.last.values())


def _divergence(copies: Copies, others: list[Copies]) -> ReplicaDivergence | None:
    """Where the copies diverge, unless that may be intended; `others` synchronise every step."""
    every = [*copies.looks, *([copies.end] if copies.end else [])]
    first = next((i for i, look in enumerate(every) if not same(look)), None)
    if first is None and (late := in_the_end(copies.looks, copies.ends, copies.size)):
        return ReplicaDivergence(copies, every[-1], copies.ends, {}, "not known", ahead=late)
    if not first or any(same(look) for look in every[first:]):
        return None
    equal, differ, last = every[first - 1], every[first], every[-1]
    if (skipped := _skipped(copies, equal, differ)) is not None:
        return skipped
    if any(s.averaged != equal[n].averaged for n, s in last.items()):
        return None  # the parameters themselves are communicated: local SGD, or a repair
    steps = step_of(differ) - step_of(equal)
    missing = {n: steps - (s.completed - equal[n].completed) for n, s in differ.items()}
    found = ReplicaDivergence(copies, equal, differ, missing, _gradients(copies, equal, differ))
    if differ is copies.end:
        # After the run, a rank may load another model to look at it: only a step that was not
        # synchronised shows a fault.
        return found if any(missing.values()) and _mostly(copies.looks[0], equal) else None
    if last is not differ and _stopped(differ, last):
        found = replace(found, stopped=all(count == steps for count in missing.values()))
        if _mostly(copies.looks[0], last):
            return found
        if _little(copies, differ, last):
            goes_on = (o for o in others if step_of(o.last) == step_of(last))
            other_group = next(
                (o for o in goes_on if o.members.keys().isdisjoint(copies.members)), None
            )
            if other_group:
                return replace(found, other_group=tuple(other_group.members))
            return replace(found, early=True) if _went_apart(copies, found) else None
    return found if _mostly(differ, last) else None


def _went_apart(copies: Copies, found: ReplicaDivergence) -> bool:
    """Whether all gradients of every step were synchronised up to the divergence, of more than one
    step, and the gradients differ at each look since, up to an end that is on record."""
    begin, end = found.steps
    later = [look for look in copies.looks if step_of(look) >= end]
    return (
        found.stopped
        and copies.end is not None
        and begin > 1
        and all(s.completed == begin for s in found.equal.values())
        and all(len({s.gradients for s in look.values()}) > 1 for look in later)
    )


def _skipped(copies: Copies, equal: Rows, differ: Rows) -> ReplicaDivergence | None:
    """Where the copies diverge because some ranks skipped a step whose gradients all synchronised.
    On these ranks, `averaged` counts what is communicated then as parameters."""
    found = ahead(copies.looks, copies.ends, copies.size)
    if found is None or found.step not in (step_of(equal), step_of(differ)):
        return None
    if any(s.averaged != equal[n].averaged for n, s in differ.items() if n not in found.ranks):
        return None
    return ReplicaDivergence(copies, equal, differ, {}, "not known", ahead=found)


def _synced_once(copies: Copies) -> ReplicaDivergence | None:
    """Where the copies diverge because only the first step was synchronised, and so little was
    communicated since that nothing else can be meant to keep them equal."""
    if len(copies.looks) < LOOKS_AT_LEAST:
        return None
    first, equal, *later = copies.looks
    last = copies.end or later[-1]
    if (step_of(first), step_of(equal)) != (0, 1) or not (same(first) and same(equal)):
        return None
    alike = [len({s.gradients for s in look.values()}) == 1 for look in copies.looks]
    if not _moved(first, equal) or not alike[0] or any(alike[1:]):
        return None
    if any(same(look) for look in (*later, last)):
        return None
    if not _little(copies, None, last):
        return None
    for n, s in last.items():
        more = s.late or s.running or s.averaged != equal[n].averaged
        if more or not _done(s) == _done(equal[n]) == 1:
            return None
    missing = {n: step_of(later[0]) - 1 for n in copies.members}
    return ReplicaDivergence(copies, equal, later[0], missing, "differ", stopped=True, once=True)


def _little(copies: Copies, first: Rows | None, last: Rows) -> bool:
    """Whether less is communicated between these looks (without `first`: since the first step) than
    it takes to make the parameters equal once."""
    return all(
        s.elements - (first[n].elements if first else 0) < ENOUGH * copies.size
        for n, s in last.items()
    )


def _done(state: UnwrappedState) -> int:
    """How many steps so far were synchronised, between backward and step or inside backward."""
    return state.completed + state.inside


def _mostly(first: Rows, last: Rows) -> bool:
    """Whether every rank synchronised more than half of the steps between these looks."""
    done = [s.completed + s.complete - first[n].completed for n, s in last.items()]
    steps = [s.step + (not s.last) - first[n].step for n, s in last.items()]
    return all(2 * d > count for d, count in zip(done, steps, strict=True))


def _stopped(first: Rows, last: Rows) -> bool:
    """Whether no rank synchronised any step between these looks, nor used other communication."""
    return not any(
        s.complete or s.completed > first[n].completed or s.exchanged != "gradients"
        for n, s in last.items()
    )


def _gradients(copies: Copies, equal: Rows, differ: Rows) -> str:
    """Whether the gradients between two looks agree: see `ReplicaDivergence.gradients`."""
    begin, end = step_of(equal), step_of(differ)
    between = [look for look in copies.looks if begin <= step_of(look) < end]
    if any(len({s.gradients for s in look.values()}) > 1 for look in between):
        return "differ"
    return "agree" if len(between) == end - begin else "not known"


Options = tuple[int, str, str]
"""A step, an option that differs between ranks at it, and its values, as text."""


def _other_options(found: ReplicaDivergence) -> Options | None:
    """The first step in between that the ranks took with different options: its number, the option
    and its values, as text."""
    begin, end = found.steps
    tables = {
        n: optimizer_options.by_step(r, e.optimizer) for n, (r, e) in found.copies.members.items()
    }
    step = next((s for s in optimizer_options.skewed(tables, end - 1) if begin <= s), None)
    if step is None:
        return None
    values = optimizer_options.settled(
        {n: optimizer_options.at(table, step) for n, table in tables.items()}
    )
    option, group = optimizer_options.options(values)[0]
    return (
        step,
        option,
        optimizer_options.spelled({n: g[group].get(option) for n, g in values.items()}),
    )


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings. Groups that diverge in the same steps of one line are one finding."""
    together: dict[object, list[ReplicaDivergence]] = {}
    for found in divergences(run):
        rank, event = next(iter(found.copies.members.values()))
        place = (rank.location(event.step_site), found.steps) if found.copies.part else None
        together.setdefault(place or id(found), []).append(found)
    for first, *others in together.values():
        fields = _fields(run, first)
        more = tuple(n for o in others for n in _fields(run, o)["ranks"])
        if more:
            fields["summary"] += f"; likewise {ranks_text(more)} in other groups"
        yield fields | {"ranks": tuple(sorted((*fields["ranks"], *more)))}


def _rule(found: ReplicaDivergence, options: Options | None) -> str:
    """Why the copies diverge."""
    if found.ahead:
        return skipped_steps.SKIPPED
    if any(found.missing.values()):
        return SYNC_STOPPED if found.stopped else STEP_NOT_SYNCED
    if options is not None:
        return UNEQUAL_OPTIONS
    return UNEQUAL_UPDATES if found.gradients == "agree" else EDIT_AFTER_SYNC


def _fields(run: Run, found: ReplicaDivergence) -> dict[str, Any]:
    rank, event = next(iter(found.copies.members.values()))
    begin, end = found.steps
    minority = odd_ones(equal_ranks({n: s.parameters for n, s in found.differ.items()}))
    kind = event.kind or "a set of parameters"
    over = found.differ is found.copies.end
    later = [step_of(look) for look in found.copies.looks if step_of(look) >= end]
    last = step_of(found.copies.end) - 1 if found.copies.end else max(later, default=end)
    made = rank.location(event.site)
    options = _other_options(found)
    rule = _rule(found, options)
    who = "all ranks" if len(minority) == run.world_size else ranks_text(minority)
    where = f"between {who}"
    if len(minority) < len(found.copies.members):
        where = f"on {who} from the other ranks" + " of the group" * found.copies.part
    equal = f"the parameters were equal before step {begin} and differed "
    equal += "after the last step" if over else f"before step {end}"
    fields: dict[str, Any] = {
        "rule": rule,
        "severity": Severity.NOTE if over else Severity.ERROR,
        "confidence": Confidence.SUSPECTED
        if found.once or found.early or found.other_group
        else Confidence.PROVEN,
        "ranks": minority,
        "steps": None if over else Steps(end, last, last - end + 1),
        "subjects": tuple(p.name for p in event.parameters),
        "location": rank.location(event.step_site) or made,
        "label": "applies gradients that are not synchronised"
        if rule in (SYNC_STOPPED, STEP_NOT_SYNCED)
        else "",
        "related": tuple(Related(*place) for place in _places(found, made, options)),
        "summary": f"parameters of {kind} differ {where} "
        + ("at the end of the run" if over else f"from step {end} on")
        + ", although the program synchronises their gradients manually",
        "cause": f"{equal}: {_cause(rule, found, options)}",
        "fix": FIXES[rule].format(option=options[1] if options else ""),
        "fix_kind": FixKind.CHECK,
        "evidence": {
            "last_equal_at_step": begin,
            "first_different_at_step": end,
            "steps_in_between_not_synchronised": [
                {"rank": n, "steps": count} for n, count in found.missing.items() if count
            ],
            "gradients": found.gradients,
            "comparisons": len(found.copies.looks),
        },
        "at": min(r.wall(found.differ[n].at) for n, (r, _) in found.copies.members.items()),
    }
    if found.ahead:
        fields |= skipped_steps.fields(found.ahead, kind, fields["steps"])
        fields["evidence"] = {"last_equal_at_step": begin, **fields["evidence"]}
        fields["evidence"]["comparisons"] = len(found.copies.looks)
    return fields


def _places(
    found: ReplicaDivergence, made: Location | None, options: Options | None
) -> Iterator[tuple[str, Location]]:
    if options is not None:
        step, option, _ = options
        every = found.copies.members.values()
        spots = [optimizer_options.set_at(r, e.optimizer, option, step) for r, e in every]
        yield from ((f"sets {option}", spot) for spot in spots[:1] if spot is not None)
    if found.stopped and (last := _exchange(found)) is not None:
        yield "all-reduced here before", last
    if made is not None:
        yield "created here", made


def _exchange(found: ReplicaDivergence) -> Location | None:
    """The line of the synchronisation that stopped, on one rank."""
    number, (rank, _) = next(iter(found.copies.members.items()))
    looks = (look for look in reversed(found.copies.looks) if look[number].complete)
    spots = (rank.location(look[number].exchange_site) for look in looks)
    return next((spot for spot in spots if spot is not None), None)


SYNC_EVERY_STEP = "all-reduce the gradients before every `optimizer.step()`"

FIXES = {
    SYNC_STOPPED: SYNC_EVERY_STEP,
    STEP_NOT_SYNCED: f"{SYNC_EVERY_STEP}, also those of the last, shorter group of micro-batches",
    UNEQUAL_OPTIONS: "set `{option}` to the same value on every rank before the same step: end "
    "inner loops on all ranks together (all-reduce the condition), step schedulers on all ranks",
    **dict.fromkeys(
        (UNEQUAL_UPDATES, EDIT_AFTER_SYNC, skipped_steps.SKIPPED),
        "modify parameters and gradients on every rank with the same values, or broadcast them "
        "from one rank afterwards",
    ),
}


def _cause(rule: str, found: ReplicaDivergence, options: Options | None) -> str:
    """What happened between the look at which the copies were equal and the next one."""
    begin, end = found.steps
    steps = f"step {begin}" if end == begin + 1 else f"a step from {begin} to {end - 1}"
    if rule in (SYNC_STOPPED, STEP_NOT_SYNCED):
        missing = tuple(n for n, count in found.missing.items() if count)
        everyone = len(missing) == len(found.copies.members)
        who = f"{ranks_text(missing)} {plural(len(missing), 'does', 'do')} not, and each rank"
        return (
            f"in {'step 0' if found.once else 'earlier steps'} every rank"
            f"{' of the group' * found.copies.part} passed all gradients to a collective; "
            f"{f'from step {begin} on' if found.stopped else f'in {steps}'} "
            f"{'no rank does, and each' if everyone else who} applies its own"
            + (
                f"; {ranks_text(found.other_group)} still synchronise theirs"
                if found.other_group
                else ""
            )
        )
    if options is not None:
        step, option, values = options
        return f"the ranks take step {step} with different options, {option} is {values}"
    if rule == UNEQUAL_UPDATES:
        return (
            f"the gradients of {steps} are all-reduced and agree, so a rank modifies its "
            "parameters there, or applies a different update"
        )
    if found.gradients == "differ":
        return f"the gradients applied in {steps} differ between ranks, although all-reduced"
    return (
        f"all gradients of steps {begin} to {end - 1} are all-reduced, so a rank modifies its "
        "parameters there, or its gradients after the all-reduce"
    )
