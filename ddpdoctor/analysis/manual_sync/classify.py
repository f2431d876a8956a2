"""What happened to copies that a program keeps equal without a wrapper: the class of their history.

`CLASSES` asks in order, and the first that knows an answer is right: what goes wrong with the
collectives themselves comes before what only follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile

import msgspec

from ...events import Averaged
from ...events.drift import ABSENT, ZERO
from ...events.pack import unpack
from ...report.findings import Check, Finding
from ...run import Run, named, ranks_text
from ..replicas import state_loading
from ..replicas.causes import Cause
from . import divergence, rules
from .cases import Case, WithoutGradient
from .copies import (
    NONE,
    Copies,
    History,
    Rows,
    members_of,
    moved,
    parting,
    same,
    step_of,
    trained_copies,
)
from .divergence import Divergence
from .synced_replicas import as_replicas
from .thresholds import ENOUGH, LOOKS, LOOKS_SINCE_STOPPED


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
        found, more = first.finding(check), {n for case in others for n in case.ranks}
        if more:
            found = msgspec.structs.replace(
                found,
                ranks=tuple(sorted({*found.ranks, *more})),
                summary=f"{found.summary}; likewise {ranks_text(more)} in other groups",
            )
        yield found


def cases(run: Run) -> Iterator[Case]:
    """What went wrong with each model that several ranks train without a wrapper."""
    every = list(trained_copies(run))
    for copies in every:
        answers = (classify(copies, every) for classify in CLASSES)
        if (case := next((a for a in answers if a is not None), None)) is not None:
            yield replace(case, load=_load_before(case))


def _load_before(case: Case) -> Cause | None:
    """What some ranks alone load before copies differ whose gradients agree."""
    if case.rule not in UNEQUAL_VALUES:
        return None
    group, begin = as_replicas(case.copies), case.begin
    earlier = (step for look in case.copies.looks if (step := step_of(look)) < begin)
    equal = max(earlier, default=-1)
    windows = {
        "weights": range(equal + 1, begin + 1),
        "optimizer": range(max(equal, 0), begin),  # applies with the next step
    }
    until = max(case.copies.members[n][0].wall(state.at) for n, state in case.look.items())
    for what, steps in windows.items():
        loads = state_loading.Loads(group, what, until, steps)
        if loads.on_some is not None:
            return loads.cause()
    return None


def judged(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(
        c.kept_equal
        or c.steady
        or c.agreed
        or _began_equal(c)
        or _averaged(c)
        or not_awaited(c, [])
        or divergence.synced_once(c, [])
        for c in trained_copies(run)
    )


# Classes of single parameters.


def not_awaited(copies: Copies, every: list[Copies]) -> Case | None:
    """Copies that were equal diverge, and gradients were applied while a collective on them was
    still running."""
    first = parting(map(same, copies.looks))
    if not first or not any(s.running for s in copies.states):
        return None
    return Case(rules.NOT_AWAITED, copies, copies.looks[first], range(len(copies.names)))


def _without_gradient(copies: Copies, every: list[Copies]) -> Case | None:
    """At some step ranks passed the gradients that they had to collectives, of different
    parameters; some of these have differed since, and were equal before."""
    if not copies.steady:
        return None
    now = dict.fromkeys(copies.absences, NONE)
    for step in sorted({step for rows in copies.absences.values() for step in rows}):
        here = {n: rows[step] for n, rows in copies.absences.items() if step in rows}
        now |= {n: frozenset(unpack(e.positions)) for n, e in here.items()}
        lone = frozenset.union(*now.values()) - frozenset.intersection(*now.values())
        before = [k for k, look in enumerate(copies.close) if step_of(look) <= step]
        apart = [
            i
            for i in sorted(lone)
            if all(copies.parameters[i].equal[k] for k in before)
            and not all(copies.parameters[i].equal[len(before) :])
        ]
        if apart:
            lacking = {n: sorted(mine & lone) for n, mine in now.items() if mine & lone}
            needed = {n: sum(copies.sizes[i] for i in mine) for n, mine in lacking.items()}
            placed = all(n in here and here[n].other >= size for n, size in needed.items())
            rule = rules.APPLIED_ON_SOME if placed else rules.MISMATCHED
            first = min(lacking)
            example = named(copies.names, lacking[first]), f"rank {first}"
            wall = min(copies.members[n][0].wall(e.at) for n, e in here.items())
            return WithoutGradient(
                rule, copies, copies.looks[0], apart, blamed=tuple(lacking), step=step, wall=wall,
                lacking=lacking, example=example,
            )  # fmt: skip
    return None


def _averaged(copies: Copies) -> list[Rows]:
    """The looks right after collectives that carried all parameters on all ranks."""
    after = [k for k in copies.looks if all(s.just for s in k.values())]
    parameters = all(s.exchanged == "parameters" for k in after for s in k.values())
    return after if parameters and len(after) >= LOOKS else []


def _averages_lost(copies: Copies, every: list[Copies]) -> Case | None:
    """Parameters are passed to collectives again and again, and are not equal right after it, nor
    changed by it."""
    after = _averaged(copies)
    if not after or any(map(same, after)) or not moved(after[0], after[-1]):
        return None
    for rank, event in copies.members.values():
        written = (e for e in rank.of(Averaged) if e.kind == "parameters")
        if any(e.optimizer == event.optimizer for e in written):
            return None
    return Case(rules.AVERAGES_LOST, copies, after[0], range(len(copies.names)))


def _part_stopped(copies: Copies, every: list[Copies]) -> Case | None:
    """All gradients were synchronised in every step up to one and in none since, and just the
    parameters differ whose gradients no longer are."""
    first = parting(map(same, copies.looks))
    if not first or not (copies.steady and copies.kept_equal):
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
        (h.equal[k] and h.agree[k]) or all(h.passed[k]) or (h.synced[k] and not h.agree[k])
        for h in map(copies.parameters.__getitem__, others)
        for k in looks
    ):
        return None
    torn = _torn([copies.names[i] for i in local], [copies.names[i] for i in others])
    rule, since = rules.PART_STOPPED if torn else rules.LAYERS_STOPPED, later[0].completed
    return Case(rule, copies, copies.looks[first], local, others, since=since)


def _apart(history: History, look: int) -> bool:
    """Whether a parameter and its gradient differ, and no rank passed the gradient on."""
    own = ABSENT not in history.gradients[look] and not history.agree[look]
    return own and not history.equal[look] and not any(history.passed[look])


def _unequal_start(copies: Copies, every: list[Copies]) -> Case | None:
    """Some parameters differ from the first step on, although all gradients are synchronised."""
    if not copies.agreed and not (copies.steady and all(s.complete for s in copies.states)):
        return None
    unequal = _positions(copies, lambda h: h.trained and not any(h.equal))
    if not all(all(h.agree) for h in copies.parameters) or not _any_moved(copies, unequal):
        return None
    return Case(rules.UNEQUAL_START, copies, copies.close[0], unequal)


def _never_synced(copies: Copies, every: list[Copies]) -> Case | None:
    """Some parameters were equal and diverge, as their gradients are never synchronised."""
    if not copies.steady or not all(h.equal[0] for h in copies.parameters):
        return None
    agreeing = _agreeing(copies)
    if not agreeing and not copies.accounted:
        return None
    always = _positions(copies, lambda h: all(map(any, h.passed)))
    shared = sorted({*always, *agreeing})
    local = _positions(
        copies, lambda h: h.present and not h.handed and not any(h.synced) and _diverges(h)
    )
    enough = sum(copies.sizes[i] for i in shared) >= ENOUGH * copies.size
    if not enough or not _any_moved(copies, local):
        return None
    firsts = (copies.parameters[i].equal.index(False) for i in local)
    look = copies.close[min(firsts)]
    names, others = [copies.names[i] for i in local], [copies.names[i] for i in shared]
    remarks: tuple[str, ...] = ()
    example: tuple[str, ...] = ()
    if torn := _torn(names, others):
        left = next(name for name in names if _layer(name) in torn)
        synced = next(name for name in others if _layer(name) == _layer(left))
        remarks, example = (rules.IN_ONE_LAYER,), (synced, left)
    if any(not copies.parameters[i].equal[-1] for i in shared):
        remarks = (*remarks, rules.OTHERS_TOO)
    rule = rules.NEVER_SYNCED
    if rules.OTHERS_TOO in remarks and _parted_by_clipping(copies, shared):
        rule, remarks = rules.NEVER_SYNCED_CLIPPED, (*remarks[:-1], rules.OTHERS_CLIPPED)
    if not remarks:
        part = _rest_of(copies, local, others)
        rule, example = rules.NEVER_SYNCED_REST if part else rules.NEVER_SYNCED_LAYERS, (part,)
    return Case(rule, copies, look, local, shared, remarks=remarks, example=example)


def _parted_by_clipping(copies: Copies, shared: list[int]) -> bool:
    """Whether gradients were equal on all ranks until torch clipped them, at some look."""
    histories = [copies.parameters[i] for i in shared]
    return any(h.synced[k] and not h.agree[k] for h in histories for k in range(len(h.agree)))


def _layer(name: str) -> str:
    """The module that owns a parameter."""
    return name.rpartition(".")[0]


def _torn(names: list[str], others: list[str]) -> list[str]:
    """The modules that own parameters of both lists."""
    return sorted(({*map(_layer, names)} & {*map(_layer, others)}) - {""})


def _rest_of(copies: Copies, local: list[int], others: list[str]) -> str:
    """The part of the model of which `local` are the rest, as a bucket that is never full leaves
    it: consecutive parameters of one part, `others` of which are synchronised, where a collective
    of these ranks carried all parameters before the first step. Empty where it is not so: layers
    of one kind are not consecutive, and a head is a part by itself."""
    spread = (members_of(r, copies.looks[0][n].spread) for n, (r, _) in copies.members.items())
    owners = {copies.names[i].partition(".")[0] for i in local if "." in copies.names[i]}
    consecutive = local == list(range(local[0], local[-1] + 1))
    inside = owners <= {name.partition(".")[0] for name in others}
    whole = consecutive and len(owners) == 1 and inside
    return owners.pop() if whole and all(g == copies.members.keys() for g in spread) else ""


def _diverges(history: History) -> bool:
    """Whether a parameter was equal, and is not from some look on, which is not the last. Adam's
    first update may still be equal: it depends on the sign of the gradient only."""
    return 0 < (parting(history.equal) or 0) < len(history.equal) - 1


def _agreeing(copies: Copies) -> list[int]:
    """The positions whose gradients are equal on all ranks. A look at which none is does not count:
    the program itself scales gradients by a norm of all, including those not synchronised."""
    looks = range(len(copies.close))
    some = [k for k in looks if any(h.synced[k] for h in copies.parameters)]
    if len(some) < LOOKS or some[0]:
        return []
    return _positions(copies, lambda h: h.trained and all(h.synced[k] for k in some))


def _unequal_updates(copies: Copies, every: list[Copies]) -> Case | None:
    """Parameters that begin equal differ for good, although gradients agree."""
    if copies.kept_equal or any(s.running for s in copies.states):
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
    if not differ or not (kept or copies.steady or copies.agreed):
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
    rule = rules.UPDATE_ON_SOME if still else rules.UPDATES_DIFFER
    remarks = (rules.STAY_EQUAL,) if kept else ()
    look = copies.close[first]
    return Case(rule, copies, look, list(differ), kept, blamed=still, remarks=remarks)


def _began_equal(copies: Copies) -> bool:
    """Whether some parameters begin equal and have a gradient before every step, and no gradient
    differs between ranks."""
    return copies.agree_from_start and any(h.trained and h.equal[0] for h in copies.parameters)


def _other_optimizer(copies: Copies, every: list[Copies]) -> Case | None:
    """An optimizer's gradients are never synchronised, and those of another optimizer of the same
    model are in every step."""
    shared = next((c for c in every if _one_model(copies, c) and c.steady), None)
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
        copies, lambda h: h.present and any({*row} != {ZERO} for row in h.gradients)
    )
    every_one = [copies.parameters[i] for i in trained]
    if any(all(h.agree) for h in every_one):
        return None  # synchronised by means that were not seen
    if all(any(h.agree) or any(h.equal[1:]) for h in every_one):
        return None
    differ = [i for i in trained if not copies.parameters[i].equal[-1]]
    if not differ:
        return None
    rule, torn = rules.OTHER_OPTIMIZER, _torn(copies.names, shared.names)
    if torn:
        rule = rules.OTHER_OPTIMIZER_TORN
    elif _one_part(copies.names, shared.names) or _one_part(shared.names, copies.names):
        rule = rules.OTHER_OPTIMIZER_PART
    return Case(rule, copies, copies.looks[1], differ, beside=shared, example=tuple(torn[:1]))


def _one_part(names: list[str], others: list[str]) -> bool:
    """Whether these are all parameters of one module (or one parameter), which has none of the
    others."""
    paths = [name.split(".") for name in names]
    common = [row[0] for row in takewhile(lambda r: len(set(r)) == 1, zip(*paths, strict=False))]
    return bool(common) and not any(n.split(".")[: len(common)] == common for n in others)


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


UNEQUAL_VALUES = (
    rules.UNEQUAL_START, rules.UPDATES_DIFFER, rules.UNEQUAL_UPDATES, rules.EDIT_AFTER_SYNC,
)  # fmt: skip
"""Rules by which copies differ though equal gradients are applied: what a rank loads does that."""

CLASSES: tuple[Callable[[Copies, list[Copies]], Case | None], ...] = (
    not_awaited,
    _without_gradient,
    _averages_lost,
    divergence.once_kept_equal,
    divergence.synced_once,
    _part_stopped,
    _unequal_start,
    _never_synced,
    _other_optimizer,
    _unequal_updates,
)
