"""Copies without a wrapper, kept equal by gradients that the program exchanges by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import msgspec

from ...events import GroupReady, Unwrapped, UnwrappedState
from ...report.findings import Confidence, FixKind, Related, Severity, Steps
from ...run import Location, Rank, Run, equal_ranks, odd_ones, ranks_text
from ..replicas import optimizer_options
from . import skipped_steps
from .skipped_steps import SkippedSteps, ahead, in_the_end

LOOKS_AT_LEAST = 5
"""Where all but the first step are taken without an exchange."""

ENOUGH = 0.5
"""Share of the parameters' elements that would have to be exchanged to make them equal."""

BESIDE = ("gradients of a group", "point-to-point", "all-to-all", "in backward")
"""What a group may do besides, with others than its own ranks."""

NONE: frozenset[int] = frozenset()

Rows = dict[int, UnwrappedState]
"""States of one moment by global rank, or of one rank by step."""


@dataclass(frozen=True)
class Copies:
    """One model as every rank of a group trains it; looks that all of them took, ascending.

    Attributes:
        end: the look when the run was over, None where a rank has none, or they took unlike many
            steps; ends: those that there are.
        part: the group is a part of the world.
    """

    members: dict[int, tuple[Rank, Unwrapped]]
    looks: list[Rows]
    end: Rows | None
    part: bool = False
    ends: Rows = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Elements of the parameters."""
        return sum(prod(p.shape) for p in next(iter(self.members.values()))[1].parameters)

    @property
    def last(self) -> Rows:
        return self.end or self.looks[-1]


@dataclass(frozen=True)
class ReplicaDivergence:
    """Where copies part: they are equal at the look `equal` and at none from `differ` on.

    Attributes:
        missing: how many steps between the two were taken without the exchange, by rank.
        gradients: whether those applied agree: `agree`, `differ`, or `not known`.
        stopped: none of the steps after `equal` was taken with the exchange.
        once: and of those before it, the first one only.
        early: and all of those before it, which are no more than half of the run.
        beside: the ranks of another group, which exchange theirs in every step, where only that
            tells that it is no fault of theirs.
        ahead: who has left steps out, of which all exchanged the gradients.
    """

    copies: Copies
    equal: Rows
    differ: Rows
    missing: dict[int, int]
    gradients: str
    stopped: bool = False
    once: bool = False
    early: bool = False
    beside: tuple[int, ...] = ()
    ahead: SkippedSteps | None = None

    @property
    def steps(self) -> tuple[int, int]:
        return _step(self.equal), _step(self.differ)


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(kept_equal(c) or _exchanged_once(c) for c in trained_alike(run))


def partings(run: Run) -> Iterator[ReplicaDivergence]:
    every = list(trained_alike(run))
    steady = [c for c in every if c.part and kept_equal(c) and _always(c)]
    for copies in every:
        found = _parting(copies, steady) if kept_equal(copies) else None
        if (found := found or _exchanged_once(copies)) is not None:
            yield found


def trained_alike(run: Run) -> Iterator[Copies]:
    """Of optimizers that every rank of the world has over equal lists of parameters, or every rank
    of the one group that it hands all gradients to. One whose list changes is left out: its counts
    begin anew."""
    world = frozenset(range(run.world_size))
    optimizers = {e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}
    for optimizer in sorted(optimizers) if run.world_size > 1 else ():
        members = {}
        for number, rank in run.ranks.items():
            events = [e for e in rank.of(Unwrapped) if e.optimizer == optimizer]
            if len(events) == 1:
                members[number] = (rank, events[0])
        groups = {n: _group(rank, optimizer) for n, (rank, _) in members.items()}
        for ranks in (world, *sorted({*groups.values()} - {world, NONE}, key=min)):
            mine = {n: m for n, m in members.items() if ranks in (world, groups[n])}
            held = {tuple((p.shape, p.dtype) for p in e.parameters) for _, e in mine.values()}
            if len(mine) == len(ranks) > 1 and len(held) == 1:
                yield _looked(mine, optimizer, part=ranks != world)


def _group(rank: Rank, optimizer: int) -> frozenset[int]:
    """Of the group that all its gradients are handed to, where that is not the default one."""
    last = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer][-1:]
    return members_of(rank, last[0].group) if last and last[0].group else NONE


def members_of(rank: Rank, group: int) -> frozenset[int]:
    """The ranks of a group, none where it is not known."""
    return next((frozenset(g.ranks) for g in rank.of(GroupReady) if g.group == group), NONE)


def _within(ranks: frozenset[int], rank: Rank, state: UnwrappedState, part: bool) -> UnwrappedState:
    """As it is for these ranks: what is complete in another group is not in theirs, and what is
    done with none of them is nothing to them."""
    if members_of(rank, state.group) != ranks if state.group else part:
        return msgspec.structs.replace(state, complete=False, completed=0)
    alone = state.group and ranks.isdisjoint(state.partners) and -1 not in state.partners
    if alone and state.exchanged in BESIDE:
        return msgspec.structs.replace(state, exchanged="gradients")
    return state


def _looked(members: dict[int, tuple[Rank, Unwrapped]], optimizer: int, *, part: bool) -> Copies:
    ranks = frozenset(members)
    tables: dict[int, Rows] = {}
    ends: Rows = {}
    for number, (rank, _) in members.items():
        found = [s for s in rank.of(UnwrappedState) if s.optimizer == optimizer]
        states = [_within(ranks, rank, s, part) for s in found]
        tables[number] = {s.step: s for s in states if not s.last}
        ends.update((number, s) for s in states if s.last)
    common = sorted(set.intersection(*(set(t) for t in tables.values())))
    looks = [{n: t[step] for n, t in tables.items()} for step in common]
    whole = len(ends) == len(members) and len({s.step for s in ends.values()}) == 1
    return Copies(members, looks, ends if whole else None, part, ends)


def _step(look: Rows) -> int:
    return next(iter(look.values())).step


def same(look: Rows) -> bool:
    return len({s.parameters for s in look.values()}) == 1


def kept_equal(copies: Copies) -> bool:
    """Whether the exchange was seen to do what it is for: every rank handed over all gradients of
    all steps between two looks, and the copies had moved and were equal at both."""
    for before, after in zip(copies.looks, copies.looks[1:], strict=False):
        if not (same(before) and same(after)):
            return False
        steps = _step(after) - _step(before)
        whole = all(s.completed - before[n].completed == steps for n, s in after.items())
        if whole and _moved(before, after):
            return True
    return False


def _moved(before: Rows, after: Rows) -> bool:
    return all(s.parameters != before[n].parameters for n, s in after.items())


def _always(copies: Copies) -> bool:
    """Whether all gradients of every step were exchanged."""
    return all(s.completed + s.complete == s.step + (not s.last) for s in copies.last.values())


def _parting(copies: Copies, others: list[Copies]) -> ReplicaDivergence | None:
    """Where they part, if that is no fault of what is meant; `others` exchange in every step."""
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
        return None  # the parameters themselves are exchanged: local SGD, or set right again
    steps = _step(differ) - _step(equal)
    missing = {n: steps - (s.completed - equal[n].completed) for n, s in differ.items()}
    found = ReplicaDivergence(copies, equal, differ, missing, _gradients(copies, equal, differ))
    if differ is copies.end:
        # Whoever looks at a model after the run may load another one: only a step that was left
        # out speaks for a fault.
        return found if any(missing.values()) and _mostly(copies.looks[0], equal) else None
    if last is not differ and _stopped(differ, last):
        found = replace(found, stopped=all(count == steps for count in missing.values()))
        if _mostly(copies.looks[0], last):
            return found
        if _little(copies, differ, last):
            goes_on = (o for o in others if _step(o.last) == _step(last))
            beside = next((o for o in goes_on if o.members.keys().isdisjoint(copies.members)), None)
            if beside:
                return replace(found, beside=tuple(beside.members))
            return replace(found, early=True) if _went_apart(copies, found) else None
    return found if _mostly(differ, last) else None


def _went_apart(copies: Copies, found: ReplicaDivergence) -> bool:
    """Whether all gradients of every step were exchanged until they part, more than those of one,
    and those that are applied differ at each look since, up to an end that is on record."""
    begin, end = found.steps
    later = [look for look in copies.looks if _step(look) >= end]
    return (
        found.stopped
        and copies.end is not None
        and begin > 1
        and all(s.completed == begin for s in found.equal.values())
        and all(len({s.gradients for s in look.values()}) > 1 for look in later)
    )


def _skipped(copies: Copies, equal: Rows, differ: Rows) -> ReplicaDivergence | None:
    """Where they part because some left out a step, the gradients of which all exchanged: what is
    exchanged then is taken for parameters on those ranks alone."""
    found = ahead(copies.looks, copies.ends, copies.size)
    if found is None or found.step not in (_step(equal), _step(differ)):
        return None
    if any(s.averaged != equal[n].averaged for n, s in differ.items() if n not in found.ranks):
        return None
    return ReplicaDivergence(copies, equal, differ, {}, "not known", ahead=found)


def _exchanged_once(copies: Copies) -> ReplicaDivergence | None:
    """Whether the gradients of the very first step were exchanged and those of no other, and so
    little of anything since that nothing else can be meant to keep the copies equal."""
    if len(copies.looks) < LOOKS_AT_LEAST:
        return None
    first, equal, *later = copies.looks
    last = copies.end or later[-1]
    if (_step(first), _step(equal)) != (0, 1) or not (same(first) and same(equal)):
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
    missing = {n: _step(later[0]) - 1 for n in copies.members}
    return ReplicaDivergence(copies, equal, later[0], missing, "differ", stopped=True, once=True)


def _little(copies: Copies, first: Rows | None, last: Rows) -> bool:
    """Whether less is exchanged between these looks, or ever since the first step, than could make
    them equal once."""
    return all(
        s.elements - (first[n].elements if first else 0) < ENOUGH * copies.size
        for n, s in last.items()
    )


def _done(state: UnwrappedState) -> int:
    """Steps so far whose gradients were exchanged, be it inside the backward."""
    return state.completed + state.inside


def _mostly(first: Rows, last: Rows) -> bool:
    """Whether every rank exchanged all gradients of more than half of the steps of these looks."""
    done = [s.completed + s.complete - first[n].completed for n, s in last.items()]
    steps = [s.step + (not s.last) - first[n].step for n, s in last.items()]
    return all(2 * d > count for d, count in zip(done, steps, strict=True))


def _stopped(first: Rows, last: Rows) -> bool:
    """Whether no rank exchanged all gradients of any step from these looks on, nor took to other
    means."""
    return not any(
        s.complete or s.completed > first[n].completed or s.exchanged != "gradients"
        for n, s in last.items()
    )


def _gradients(copies: Copies, equal: Rows, differ: Rows) -> str:
    begin, end = _step(equal), _step(differ)
    between = [look for look in copies.looks if begin <= _step(look) < end]
    if any(len({s.gradients for s in look.values()}) > 1 for look in between):
        return "differ"
    return "agree" if len(between) == end - begin else "not known"


def _other_options(found: ReplicaDivergence) -> tuple[int, str, str] | None:
    """The step in between that the ranks took with different options, of these the first, and what
    each had."""
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
    """The fields of findings. Groups that part in the same steps of one line are told together."""
    together: dict[object, list[ReplicaDivergence]] = {}
    for found in partings(run):
        rank, event = next(iter(found.copies.members.values()))
        place = (rank.location(event.step_site), found.steps) if found.copies.part else None
        together.setdefault(place or id(found), []).append(found)
    for first, *others in together.values():
        fields = _told(run, first)
        more = tuple(n for o in others for n in _told(run, o)["ranks"])
        if more:
            fields["summary"] += f", and likewise on {ranks_text(more)} in other groups"
        yield fields | {"ranks": tuple(sorted((*fields["ranks"], *more)))}


def _told(run: Run, found: ReplicaDivergence) -> dict[str, Any]:
    rank, event = next(iter(found.copies.members.values()))
    begin, end = found.steps
    minority = odd_ones(equal_ranks({n: s.parameters for n, s in found.differ.items()}))
    left_out = tuple(n for n, count in found.missing.items() if count)
    kind = event.kind or "a set of parameters"
    over = found.differ is found.copies.end
    later = [_step(look) for look in found.copies.looks if _step(look) >= end]
    last = _step(found.copies.end) - 1 if found.copies.end else max(later, default=end)
    made = rank.location(event.site)
    options = _other_options(found)
    all_of_them = len(minority) == len(found.copies.members)
    who = "the ranks" if len(minority) == run.world_size else ranks_text(minority)
    others = "" if all_of_them else " from the other ranks" + " of the group" * found.copies.part
    fields: dict[str, Any] = {
        "severity": Severity.NOTE if over else Severity.ERROR,
        "confidence": Confidence.SUSPECTED
        if found.once or found.early or found.beside
        else Confidence.PROVEN,
        "ranks": minority,
        "steps": None if over else Steps(end, last, last - end + 1),
        "subjects": tuple(p.name for p in event.parameters),
        "location": rank.location(event.step_site) or made,
        "label": "applies gradients that were not exchanged" if left_out else "",
        "related": tuple(Related(*place) for place in _places(found, made, options)),
        "summary": f"parameters of {kind}, whose gradients the program exchanges by hand, differ "
        + (f"between {who}" if not others else f"on {who}{others}")
        + (" at the end" if over else f" from step {end} on"),
        "cause": f"they were equal before step {begin} and are not "
        + ("after the last step: " if over else f"before step {end}: ")
        + _cause(found, left_out, options),
        "fix": "exchange the gradients before every `optimizer.step()`"
        + ("" if found.stopped else ", those of the last, shorter group of micro-batches too")
        if left_out
        else f"set `{options[1]}` alike on every rank before the same step: leave inner loops on "
        "all ranks together (all-reduce what decides it), step schedulers on all of them"
        if options
        else "change parameters and gradients on every rank with the same numbers, or broadcast "
        "them from one rank afterwards",
        "fix_kind": FixKind.CHECK,
        "evidence": {
            "last_equal_at_step": begin,
            "first_different_at_step": end,
            "steps_without_the_exchange_between_these": [
                {"rank": n, "steps": count} for n, count in found.missing.items() if count
            ],
            "gradients": found.gradients,
            "looks": len(found.copies.looks),
        },
        "at": min(r.wall(found.differ[n].at) for n, (r, _) in found.copies.members.items()),
    }
    if found.ahead:
        fields |= skipped_steps.reported(found.ahead, kind, fields["steps"])
        fields["evidence"] = {"last_equal_at_step": begin, **fields["evidence"]}
        fields["evidence"]["looks"] = len(found.copies.looks)
    return fields


def _places(
    found: ReplicaDivergence, made: Location | None, options: tuple[int, str, str] | None
) -> Iterator[tuple[str, Location]]:
    if options is not None:
        step, option, _ = options
        every = found.copies.members.values()
        spots = [optimizer_options.set_at(r, e.optimizer, option, step) for r, e in every]
        yield from ((f"{option} is set here", spot) for spot in spots[:1] if spot is not None)
    if found.stopped and (last := _exchange(found)) is not None:
        yield "exchanged here before", last
    if made is not None:
        yield "made here", made


def _exchange(found: ReplicaDivergence) -> Location | None:
    """The line of the exchange that stopped, as one rank made it."""
    number, (rank, _) = next(iter(found.copies.members.items()))
    looks = (look for look in reversed(found.copies.looks) if look[number].complete)
    spots = (rank.location(look[number].exchange_site) for look in looks)
    return next((spot for spot in spots if spot is not None), None)


def _cause(
    found: ReplicaDivergence, left_out: tuple[int, ...], options: tuple[int, str, str] | None
) -> str:
    begin, end = found.steps
    steps = f"step {begin}" if end == begin + 1 else f"a step from {begin} to {end - 1}"
    if found.stopped:
        steps = f"any step from {begin} on"
    if left_out:
        everyone = len(left_out) == len(found.copies.members)
        who = "no rank" + " of the group" * found.copies.part if everyone else ranks_text(left_out)
        verb = "hands" if everyone else "does not hand" if len(left_out) == 1 else "do not hand"
        return (
            f"{who} {verb} all gradients of {steps} to a collective, as in "
            f"{'step 0' if found.once else 'the steps before'}, and each applies its own"
            + (f"; {ranks_text(found.beside)} go on with theirs" if found.beside else "")
        )
    if options is not None:
        step, option, values = options
        return f"the ranks take step {step} with different options, {option} is {values}"
    if found.gradients == "differ":
        return f"the gradients applied in {steps} differ between ranks, although they are exchanged"
    if found.gradients == "agree":
        return (
            f"the gradients of {steps} are exchanged and agree, so a rank edits its parameters "
            "there, or its update is another one"
        )
    return (
        f"all gradients of the steps from {begin} to {end - 1} are exchanged, so a rank edits its "
        "parameters there, or its gradients after the exchange"
    )
