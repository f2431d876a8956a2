"""What happened to copies that a program keeps equal without a wrapper: the class of their history.

`CLASSES` asks in order, and the first that knows an answer is right: what goes wrong with the
collectives themselves comes before what only follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from ...report.findings import Check, Finding
from ...run import Run
from ..replicas import optimizer_options
from . import divergence as whole
from . import rules
from .cases import Case
from .copies import (
    ABSENT,
    ALL_ZERO,
    Copies,
    History,
    Rows,
    agree,
    parting,
    same,
    step_of,
    trained_copies,
)
from .divergence import Divergence, Options, SkippedSteps
from .thresholds import ENOUGH, LOOKS, LOOKS_SINCE_ONCE, LOOKS_SINCE_STOPPED

EVERY = (
    rules.NEVER_SYNCED, rules.PART_STOPPED, rules.OTHER_OPTIMIZER, rules.MISMATCHED,
    rules.NOT_AWAITED, rules.UNEQUAL_START, rules.UPDATE_ON_SOME, rules.UNEQUAL_UPDATES,
    whole.SYNC_STOPPED, whole.STEP_NOT_SYNCED, whole.SKIPPED, whole.UNEQUAL_OPTIONS,
    whole.UNEQUAL_UPDATES, whole.EDIT_AFTER_SYNC,
)  # fmt: skip
RULES = {rule.name: rule.when for rule in EVERY}


def findings(check: Check, run: Run) -> Iterator[Finding]:
    """One for each model that diverges; groups that diverge in the same steps of one line are one
    finding."""
    together: dict[object, list[Divergence]] = {}
    for case in cases(run):
        if isinstance(case, Divergence) and case.copies.part:
            together.setdefault((case.spot("step"), case.window), []).append(case)
        else:
            yield case.finding(check)
    for first, *others in together.values():
        more = tuple(n for case in others for n in case.ranks)
        yield replace(first, likewise=more).finding(check)


def cases(run: Run) -> Iterator[Case]:
    """What went wrong with each model that several ranks train without a wrapper."""
    every = list(trained_copies(run))
    for copies in every:
        answers = (classify(copies, every) for classify in CLASSES)
        if (case := next((a for a in answers if a is not None), None)) is not None:
            yield case


def judged(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(
        kept_equal(c)
        or steady(c)
        or _agreed(c)
        or _began_equal(c)
        or not_awaited(c, [])
        or _once(c, [])
        for c in trained_copies(run)
    )


def equal_gradients(copies: Copies) -> bool:
    """Whether the program synchronises the gradients, which agree at every look from before the
    first step on, but was not seen to keep the parameters equal that way."""
    return steady(copies) and _agree_from_start(copies) and not kept_equal(copies)


# What the program does about its gradients.


def steady(copies: Copies) -> bool:
    """Whether all ranks synchronised most gradients of every step, and no parameters since the
    first."""
    if len(copies.close) < LOOKS:
        return False
    first = copies.looks[0]
    return all(
        s.exchanged == "gradients" and s.shared == s.step + 1 for s in copies.states
    ) and all(
        s.averaged == first[n].averaged
        for look in (*copies.looks, copies.end or {})
        for n, s in look.items()
    )


def _agreed(copies: Copies) -> bool:
    """Whether gradients were equal on all ranks at every look, and new each time, and enough was
    communicated in each step to make them so, by whatever means: there may be no backward."""
    if len(copies.close) < LOOKS or not all(all(h.agree) for h in copies.parameters):
        return False
    rows = {tuple(h.gradients[k][0] for h in copies.parameters) for k in range(len(copies.close))}
    return len(rows) == len(copies.close) and all(
        s.elements >= ENOUGH * copies.size * s.step for s in copies.looks[-1].values()
    )


def kept_equal(copies: Copies) -> bool:
    """Whether manual synchronisation was seen to work: every rank passed all gradients of all steps
    between two looks to collectives, and the parameters moved and were equal at both."""
    for before, after in pairwise(copies.looks):
        if not (same(before) and same(after)):
            return False
        steps = step_of(after) - step_of(before)
        whole = all(s.completed - before[n].completed == steps for n, s in after.items())
        if whole and _moved(before, after):
            return True
    return False


def _moved(before: Rows, after: Rows) -> bool:
    return all(s.parameters != before[n].parameters for n, s in after.items())


# Classes of single parameters.


def not_awaited(copies: Copies, every: list[Copies]) -> Case | None:
    """Copies that were equal diverge, and gradients were applied while a collective on them was
    still running."""
    first = parting(map(same, copies.looks))
    if not first or not any(s.running for s in copies.states):
        return None
    return Case(rules.NOT_AWAITED, copies, copies.looks[first], range(len(copies.names)))


def _mismatched(copies: Copies, every: list[Copies]) -> Case | None:
    """At some step each rank passed the gradients it had to collectives, of different parameters;
    some of these have differed since."""
    if not steady(copies):
        return None
    for k, look in enumerate(copies.close):
        if any(
            passed is (gradient == ABSENT)
            for h in copies.parameters
            for gradient, passed in zip(h.gradients[k], h.passed[k], strict=True)
        ):
            continue
        lone = [i for i, h in enumerate(copies.parameters) if len(set(h.passed[k])) > 1]
        if any(not all(copies.parameters[i].equal[k + 1 :]) for i in lone):
            return Case(rules.MISMATCHED, copies, look, lone)
    return None


def _part_stopped(copies: Copies, every: list[Copies]) -> Case | None:
    """All gradients were synchronised in every step up to one and in none since, and just the
    parameters differ whose gradients no longer are."""
    first = parting(map(same, copies.looks))
    if not first or not (steady(copies) and kept_equal(copies)):
        return None
    later = [s for look in copies.looks[first:] for s in look.values()]
    if len({s.completed for s in later}) > 1 or any(s.complete for s in later):
        return None
    if any(s.completed != s.step for s in copies.looks[first - 1].values()):
        return None
    begin = step_of(copies.looks[first])
    looks = [k for k, look in enumerate(copies.close) if step_of(look) >= begin]
    local = _positions(copies, lambda h: all(_apart(h, k) for k in looks))
    others = [i for i in range(len(copies.names)) if i not in local]
    if len(looks) < LOOKS_SINCE_STOPPED or not (local and others):
        return None
    # Clipping by a norm of all gradients makes also those differ that are synchronised.
    if not all(
        (h.equal[k] and h.agree[k]) or all(h.passed[k])
        for h in map(copies.parameters.__getitem__, others)
        for k in looks
    ):
        return None
    look = copies.looks[first]
    return Case(rules.PART_STOPPED, copies, look, local, others, since=later[0].completed)


def _apart(history: History, look: int) -> bool:
    """Whether a parameter and its gradient differ, and no rank passed the gradient on."""
    own = ABSENT not in history.gradients[look] and not history.agree[look]
    return own and not history.equal[look] and not any(history.passed[look])


def _unequal_start(copies: Copies, every: list[Copies]) -> Case | None:
    """Some parameters differ from the first step on, although all gradients are synchronised."""
    if not _agreed(copies) and not (steady(copies) and all(s.complete for s in copies.states)):
        return None
    unequal = _positions(copies, lambda h: h.trained and not any(h.equal))
    if not all(all(h.agree) for h in copies.parameters) or not _any_moved(copies, unequal):
        return None
    return Case(rules.UNEQUAL_START, copies, copies.close[0], unequal)


def _never_synced(copies: Copies, every: list[Copies]) -> Case | None:
    """Some parameters were equal and diverge, as their gradients are never synchronised."""
    if not steady(copies) or not all(h.equal[0] for h in copies.parameters):
        return None
    agreeing = _agreeing(copies)
    if not agreeing and not copies.accounted:
        return None
    always = _positions(copies, lambda h: all(map(any, h.passed)))
    shared = sorted({*always, *agreeing})
    local = _positions(
        copies, lambda h: h.present and not h.handed and not any(h.agree) and _diverges(h)
    )
    enough = sum(copies.sizes[i] for i in shared) >= ENOUGH * copies.size
    if not enough or not _any_moved(copies, local):
        return None
    firsts = (copies.parameters[i].equal.index(False) for i in local)
    return Case(rules.NEVER_SYNCED, copies, copies.close[min(firsts)], local, shared)


def _diverges(history: History) -> bool:
    """Whether a parameter was equal, and is not from some look on, which is not the last. Adam's
    first update may still be equal: it depends on the sign of the gradient only."""
    return 0 < (parting(history.equal) or 0) < len(history.equal) - 1


def _agreeing(copies: Copies) -> list[int]:
    """The positions whose gradients are equal on all ranks. A look at which none is does not count:
    gradients are clipped by a norm of all, including those that are not synchronised."""
    looks = range(len(copies.close))
    some = [k for k in looks if any(h.agree[k] for h in copies.parameters)]
    if len(some) < LOOKS or some[0]:
        return []
    return _positions(copies, lambda h: h.trained and all(h.agree[k] for k in some))


def _unequal_updates(copies: Copies, every: list[Copies]) -> Case | None:
    """Parameters that begin equal differ for good, although gradients agree."""
    if kept_equal(copies) or any(s.running for s in copies.states):
        return None  # of a collective that runs on, what is digested is not what is applied
    if not _began_equal(copies):
        return None
    last = len(copies.close) - 2  # a look after this one confirms that they differ
    trained = _positions(copies, lambda h: h.trained and h.equal[0])
    begins = {i: parting(copies.parameters[i].equal) for i in trained}
    differ = {i: k for i, k in begins.items() if k is not None and k <= last}
    if any(not all(h.equal) for i, h in enumerate(copies.parameters) if i not in differ):
        return None
    kept = [i for i in trained if i not in differ and copies.parameters[i].moved]
    if not differ or not (kept or steady(copies)):
        return None
    first = min(differ.values())
    news = [
        copies.parameters[i].values[first - 1 : first + 1] for i, k in differ.items() if k == first
    ]
    still = tuple(
        n
        for column, n in enumerate(copies.members)
        if all(old[column] == new[column] for old, new in news)
    )
    rule = rules.UPDATE_ON_SOME if still else rules.UNEQUAL_UPDATES
    return Case(rule, copies, copies.close[first], list(differ), kept, blamed=still)


def _agree_from_start(copies: Copies) -> bool:
    """Whether every gradient is equal on all ranks at all looks, the first one before any step."""
    enough = len(copies.close) >= LOOKS and not step_of(copies.close[0])
    return enough and all(all(h.agree) for h in copies.parameters)


def _began_equal(copies: Copies) -> bool:
    """Whether some parameters begin equal and have a gradient before every step, and no gradient
    differs between ranks."""
    return _agree_from_start(copies) and any(h.trained and h.equal[0] for h in copies.parameters)


def _other_optimizer(copies: Copies, every: list[Copies]) -> Case | None:
    """An optimizer's gradients are never synchronised, and those of another optimizer of the same
    model are in every step."""
    shared = next((c for c in every if _one_model(copies, c) and steady(c)), None)
    if shared is None or len(copies.close) < LOOKS or not _never_communicated(copies):
        return None
    looks = [*copies.looks, *([copies.end] if copies.end else [])]
    if step_of(copies.close[0]) or parting(map(same, looks)) != 1:
        return None
    if any(h.handed for h in copies.parameters):
        return None
    if not copies.accounted and not all(map(same, shared.looks)):
        return None
    trained = _positions(
        copies, lambda h: h.present and any({*row} != {ALL_ZERO} for row in h.gradients)
    )
    every_one = [copies.parameters[i] for i in trained]
    if any(all(h.agree) for h in every_one):
        return None  # synchronised by means that were not seen
    if all(any(h.agree) or any(h.equal[1:]) for h in every_one):
        return None
    differ = [i for i in trained if not copies.parameters[i].equal[-1]]
    if not differ:
        return None
    return Case(rules.OTHER_OPTIMIZER, copies, copies.looks[1], differ, beside=shared)


def _one_model(some: Copies, others: Copies) -> bool:
    """Whether every rank has both parts in one module."""
    return some.members.keys() == others.members.keys() and all(
        event.root >= 0 and event.root == others.members[number][1].root
        for number, (_, event) in some.members.items()
    )


def _never_communicated(copies: Copies) -> bool:
    """Whether no collective carried gradients or parameters since the first step. Gathering the
    parameters after training does not count: it may serve to look at them."""
    first = copies.looks[0]
    return all(
        not (s.exchanged or s.late or s.shared) and s.averaged == first[n].averaged
        for look in copies.looks
        for n, s in look.items()
    ) and all(s.exchanged in ("", "gathered") for s in (copies.end or {}).values())


def _positions(copies: Copies, wanted: Callable[[History], bool]) -> list[int]:
    return [i for i, history in enumerate(copies.parameters) if wanted(history)]


def _any_moved(copies: Copies, positions: list[int]) -> bool:
    return any(copies.parameters[i].moved for i in positions)


# Classes of whole copies.


def _once_kept_equal(copies: Copies, every: list[Copies]) -> Case | None:
    """Copies that manual synchronisation kept equal diverge, unless that may be intended."""
    if not kept_equal(copies):
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
        return replace(found, suspected=True, other_group=tuple(other.members))
    return replace(found, suspected=True) if _went_apart(copies, found) else None


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
        rule = whole.SKIPPED
    elif missing and any(missing.values()):
        rule = whole.SYNC_STOPPED if stopped else whole.STEP_NOT_SYNCED
    elif options is not None:
        rule = whole.UNEQUAL_OPTIONS
    else:
        rule = whole.UNEQUAL_UPDATES if gradients == "agree" else whole.EDIT_AFTER_SYNC
    return Divergence(
        rule, copies, differ, range(len(copies.names)), equal=equal, missing=missing or {},
        gradients=gradients, stopped=stopped, once=once, suspected=once, ahead=ahead,
        options=options,
    )  # fmt: skip


def _once(copies: Copies, every: list[Copies]) -> Case | None:
    """The copies diverge because only the first step was synchronised, and so little was
    communicated since that nothing else can be meant to keep them equal."""
    if len(copies.looks) < LOOKS_SINCE_ONCE:
        return None
    first, equal, *later = copies.looks
    last = copies.end or later[-1]
    if (step_of(first), step_of(equal)) != (0, 1) or not _moved(first, equal):
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
        and kept_equal(copies)
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


# Steps that some ranks skip, although all synchronised the gradients.


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


CLASSES: tuple[Callable[[Copies, list[Copies]], Case | None], ...] = (
    not_awaited,
    _mismatched,
    _once_kept_equal,
    _once,
    _part_stopped,
    _unequal_start,
    _never_synced,
    _other_optimizer,
    _unequal_updates,
)
