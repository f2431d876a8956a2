"""Models that ranks train without a wrapper, and whose gradients nothing synchronises: which of the
rows of `unwrapped_rules` is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from ...events import StepDone, Unwrapped, UnwrappedState
from ...report.findings import Check, Finding
from ...run import Rank, Run, counted
from . import independent_models, other_exchanges, parallelism
from . import unwrapped_rules as rules
from .copies import Copies, agree, aligned, form, parting, same, states_of, step_of
from .thresholds import ENOUGH, LOOKS, NEAR
from .unwrapped_rules import Alone

GROUP = "gradients of a group"
HOOKS = "in backward"
"""Values of `UnwrappedState.exchanged`: gradients synchronised within a smaller group, and by hooks
in the backward."""


def findings(check: Check, run: Run) -> Iterator[Finding]:
    """One for all such models of a class that one line makes, one after the other."""
    together: dict[object, list[tuple[str, Finding]]] = {}
    for case in cases(run):
        found = case.finding(check)
        place = found.location or case.event.optimizer
        key = (place, found.rule, case.kind, found.ranks, found.subjects)
        together.setdefault(key, []).append((case.title, found))
    for each in together.values():
        titles, (first, *others) = zip(*each, strict=True)
        if others:
            numbers = {number for _, found in each for number in found.optimizers}
            distinct = len(set(titles)) == len(titles)
            more = counted(len(others), "more such model")
            first = msgspec.structs.replace(
                first,
                optimizers=tuple(sorted(numbers)),
                summary=f"{first.summary}; this line makes {more}",
                evidence=first.evidence | {"models": list(titles) if distinct else len(titles)},
            )
        yield first


def cases(run: Run) -> Iterator[Alone]:
    """What is wrong with each model that two or more ranks train without a wrapper."""
    for optimizer in sorted({e.optimizer for r in run.ranks.values() for e in r.of(Unwrapped)}):
        for copies in _replicas(run, optimizer):
            if (case := _judge(run, copies)) is not None:
                yield case
        yield from parallelism.beside(run, optimizer)


def _judge(run: Run, copies: Copies) -> Alone | None:
    looks = copies.looks
    if not looks:
        return None
    means = {n: _exchanged(rank, event) for n, (rank, event) in copies.members.items()}
    used = {mean for each in means.values() for mean in each}
    every = range(len(copies.names))
    whole = Alone(rules.NEVER_WRAPPED, copies, looks[0], every, world=run.world_size)
    if _result_unused(run, copies):
        return replace(whole, rule=rules.RESULT_UNUSED)
    if used == {HOOKS} and all(means.values()):
        return _without_hook(whole)
    if used:
        return _outside_group(whole, means) if used == {GROUP} and not all(means.values()) else None
    equal, alike = [*map(same, looks)], [*map(agree, looks)]
    if not all(equal) and parting(equal) is None:
        return None  # equal again: synchronised by means that were not seen
    if len(looks) > 1 and all(equal) and not all(alike):
        return None  # equal although gradients differ: in the optimizer's own step
    if equal[0] and all(_synced_beside(rank, event) for rank, event in copies.members.values()):
        return None  # `parameter-drift` reports what a manual synchronisation leaves out
    if not any(alike):
        return _differing(run, whole)
    if len(looks) > 1 and all(equal) and not _may_synchronise(copies):
        return replace(whole, rule=rules.EQUAL_REPLICAS)
    return None


def _differing(run: Run, whole: Alone) -> Alone | None:
    """Gradients differ at every look, and no collective carried them before it. What explains this
    for some of the parameters comes first."""
    copies = whole.copies
    if any(s.late for s in copies.states):
        return replace(whole, rule=rules.SYNCED_AFTER_STEP)
    if (part := _others_exchanged(whole) or _left_out(whole)) is not None:
        return part
    if kept := _others_kept_equal(copies):
        return replace(whole, rule=rules.OTHER_OPTIMIZER_SYNCED, others=range(kept))
    if independent_models.searched(run, copies) or independent_models.adapted(copies):
        return None
    doubt = independent_models.possible(run, copies)
    return replace(whole, rule=rules.INDEPENDENT_MODELS, doubt=doubt) if doubt else whole


def _result_unused(run: Run, copies: Copies) -> bool:
    """Whether at every close look each rank had passed copies of its gradients to collectives
    (unchanged or divided by the world size), gradients still differ between ranks, and so do
    parameters, which were equal at most at the begin."""
    expected = (1.0, 1.0 / run.world_size)
    return (
        len(copies.close) >= LOOKS
        and not any(map(agree, copies.close))
        and not any(map(same, copies.close[1:]))
        and all(
            any(abs(s.copied / e - 1) < NEAR for e in expected)
            for look in copies.close
            for s in look.values()
        )
    )


def _others_exchanged(whole: Alone) -> Alone | None:
    """At every close look the program itself had passed some gradients to collectives, which are
    equal since, and not the others, which are not."""
    copies = whole.copies
    if len(copies.close) < LOOKS:
        return None
    own = list(enumerate(copies.parameters))
    shared = [i for i, h in own if h.trained and all(map(all, h.passed)) and all(h.agree)]
    local = [i for i, h in own if h.present and not h.handed and not any(h.agree)]
    if not (shared and local):
        return None
    return replace(whole, rule=rules.OTHERS_EXCHANGED, positions=local, others=shared)


def _left_out(whole: Alone) -> Alone | None:
    """The optimizer's own step keeps parameters equal whose gradients differ, and communicates
    enough for it, but leaves out some that diverge."""
    copies = whole.copies
    if len(copies.close) < LOOKS:
        return None
    own = {i: h for i, h in enumerate(copies.parameters) if not all(h.agree[1:])}
    kept = [i for i, h in own.items() if all(h.equal) and h.moved]
    differ = [i for i, h in own.items() if parting(h.equal)]
    size = sum(copies.sizes[i] for i in kept)
    states = [s for look in copies.close for s in look.values() if s.step > 1]
    if not (differ and kept) or any(s.elements < ENOUGH * size * (s.step - 1) for s in states):
        return None
    return replace(whole, rule=rules.LEFT_OUT, positions=differ, others=kept)


def _without_hook(whole: Alone) -> Alone | None:
    """The backward communicates as many elements as the gradients have that are equal: hooks do
    that, which parameters miss that diverge after the first step."""
    copies = whole.copies
    if len(copies.close) < LOOKS:
        return None
    own = list(enumerate(copies.parameters))
    kept = [i for i, h in own if h.present and all(h.agree) and all(h.equal)]
    differ = [i for i, h in own if parting(h.equal) == 1 and not any(h.agree)]
    size = sum(copies.sizes[i] for i in kept)
    states = [s for look in copies.close for s in look.values()]
    moved = any(copies.parameters[i].moved for i in kept)
    if not (differ and moved) or any(s.within != size for s in states):
        return None
    return replace(whole, rule=rules.WITHOUT_HOOK, positions=differ, others=kept)


def _outside_group(whole: Alone, means: dict[int, set[str]]) -> Alone | None:
    """Ranks that start with the parameters of the others, but are outside of the group in which
    those average their gradients."""
    looks = whole.copies.looks
    if len(looks) < LOOKS or step_of(looks[0]) or parting(map(same, looks)) != 1:
        return None
    lone = {n: member for n, member in whole.copies.members.items() if not means[n]}
    return replace(
        whole,
        rule=rules.OUTSIDE_GROUP,
        copies=Copies(lone, looks),
        outside=tuple(n for n in means if n not in lone),
    )


def _others_kept_equal(copies: Copies) -> int:
    """How many parameters of the model in other optimizers are equal on these ranks at every look,
    although their gradients differ."""
    rank, event = copies.first
    others = {e.optimizer: len(e.parameters) for e in _beside(rank, event)}
    count = 0
    for optimizer, parameters in others.items():
        looks = aligned({
            n: {s.step: s for s in states_of(r, optimizer) if not s.last}
            for n, (r, _) in copies.members.items()
        })  # fmt: skip
        if len(looks) >= LOOKS and all(map(same, looks)) and not all(map(agree, looks)):
            count += parameters
    return count


def _beside(rank: Rank, event: Unwrapped) -> list[Unwrapped]:
    """Records of other optimizers that train the same model."""
    return [
        e
        for e in rank.of(Unwrapped)
        if e.root == event.root >= 0 and e.optimizer != event.optimizer
    ]


def _replicas(run: Run, optimizer: int) -> Iterator[Copies]:
    """Two or more ranks that train equal lists of parameters with the optimizer of that number, if
    no rank trains another list with it."""
    kinds: dict[tuple[object, ...], dict[int, tuple[Rank, Unwrapped]]] = {}
    for number, rank in run.ranks.items():
        for event in rank.of(Unwrapped):
            if event.optimizer == optimizer:
                kinds.setdefault(form(event), {})[number] = (rank, event)
    training = sum(map(len, kinds.values()))
    for members in kinds.values():
        if 1 < len(members) == training:
            tables = {
                n: {s.step: s for s in _states(r, optimizer)} for n, (r, _) in members.items()
            }
            yield Copies(members, aligned(tables))


def _states(rank: Rank, optimizer: int) -> list[UnwrappedState]:
    """What was examined before the optimizer's steps. A step that raised is left out: what it would
    have exchanged is missing."""
    found = states_of(rank, optimizer)
    if rank.exception is None:
        return found
    taken = rank.steps_of(optimizer)
    broken = {s.step for s in found if s.step >= taken and not s.last}
    return [s for s in found if s.step not in broken]


def _exchanged(rank: Rank, event: Unwrapped) -> set[str]:
    """How these parameters were exchanged since the first step, also under another optimizer that
    was made for them (for each round of averaging, say): values of `UnwrappedState.exchanged`."""
    model = event.kind, event.parameters
    same_model = {e.optimizer for e in rank.of(Unwrapped) if (e.kind, e.parameters) == model}
    states = (s for s in rank.of(UnwrappedState) if s.optimizer in same_model)
    return {s.exchanged for s in states if s.exchanged}


def _synced_beside(rank: Rank, event: Unwrapped) -> bool:
    """Whether the gradients of another optimizer of the same model are synchronised manually in
    every step."""
    every = (_states(rank, e.optimizer) for e in _beside(rank, event))
    return any(
        states and all(s.exchanged == "gradients" and (s.last or s.shared > s.step) for s in states)
        for states in every
    )


def _may_synchronise(copies: Copies) -> bool:
    """Whether equal gradients may come from communication: enough numbers (or objects) are
    exchanged per step; or anything is, and no backward computes the gradients (evolution strategies
    compute them from the rewards of all ranks); or DDP averages a wrapped model, of which these
    parameters may be copies."""
    for rank, event in copies.members.values():
        last = max(_states(rank, event.optimizer), key=lambda s: s.step)
        steps = max(1, last.step)
        if last.elements >= ENOUGH * copies.size * steps or last.wrapped >= ENOUGH * steps:
            return True
        often = ENOUGH * max(1, rank.steps_of(event.optimizer))
        if other_exchanges.objects(rank, ENOUGH * copies.size) >= often:
            return True
        taken = (e for e in rank.of(StepDone) if e.optimizer == event.optimizer)
        something = last.elements or other_exchanges.calls(rank) >= often
        if something and not any(e.backwards for e in taken):
            return True
    return False
