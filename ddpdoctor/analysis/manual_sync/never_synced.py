"""Copies without a wrapper that manual synchronisation cannot keep equal: it leaves out some of
their gradients, is not waited for, or they were not equal to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...events import Tensor, Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...report.findings import Confidence, FixKind, Related, Severity, Steps
from ...run import Rank, Run, named, plural
from .copies import Copies, Rows, members_of, same, trained_copies

NEVER_SYNCED = "never-synced"
MISMATCHED = "mismatched-gradients"
NOT_AWAITED = "async-not-awaited"
UNEQUAL_START = "unequal-start"

RULES = {
    NEVER_SYNCED: "manual synchronisation leaves out the gradients of some parameters",
    MISMATCHED: "the ranks pass gradients of different parameters to one collective",
    NOT_AWAITED: "gradients are applied before an asynchronous collective has finished",
    UNEQUAL_START: "the parameters differ before the first step, and only gradients are sent",
}

ABSENT = 0
ALL_ZERO = 1
"""The digest of a tensor of zeros."""

LOOKS_AT_LEAST = 3
ENOUGH = 0.5
"""Share of the elements whose gradients are synchronised."""


@dataclass(frozen=True)
class Look:
    """What every rank had before one step.

    Attributes:
        gradients: by rank, one digest per parameter; `parameters` likewise.
        own: by rank, the positions of the gradients that it passed to collectives individually.
        reported: whether everything passed to collectives is known that way.
    """

    step: int
    gradients: list[tuple[int, ...]]
    parameters: list[tuple[int, ...]]
    own: list[frozenset[int]]
    reported: bool

    @property
    def passed(self) -> frozenset[int]:
        """The positions of the gradients that any rank passed to collectives individually."""
        return frozenset.union(*self.own)

    def equal(self, position: int) -> bool:
        """Whether a parameter is equal on all ranks."""
        return len({row[position] for row in self.parameters}) == 1

    def agree(self, position: int) -> bool:
        """Whether a gradient is equal on all ranks."""
        return len({row[position] for row in self.gradients}) == 1

    def everywhere(self, position: int) -> bool:
        """Whether every rank has a gradient."""
        return all(row[position] != ABSENT for row in self.gradients)


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(steady(c) or _running(c) or _agreed(c) for c in trained_copies(run))


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for copies in trained_copies(run):
        if (differ := _running(copies)) is not None:
            yield _not_awaited(copies, differ)
            continue
        looks = close_looks(copies)
        if not steady(copies):
            if _agreed(copies) and (unequal := _never_equal(copies, looks)) is not None:
                yield _unequal_start(copies, looks, unequal)
            continue
        if (mixed := _mixed(looks)) is not None:
            yield _mismatched(copies, *mixed)
        elif (unequal := _never_equal(copies, looks)) is not None:
            yield _unequal_start(copies, looks, unequal)
        elif (local := _left_out(copies, looks)) is not None:
            yield _never_synced(copies, looks, *local)


def _running(copies: Copies) -> Rows | None:
    """Where copies that were equal diverge, if gradients were applied while a collective on them
    was still running; None otherwise."""
    first = next((i for i, look in enumerate(copies.looks) if not same(look)), 0)
    diverged = first and not any(same(look) for look in copies.looks[first:])
    ran = any(s.running for look in copies.looks for s in look.values())
    return copies.looks[first] if diverged and ran else None


def steady(copies: Copies) -> bool:
    """Whether all ranks synchronised most gradients of every step, and no parameters since the
    first."""
    close = [look for look in copies.looks if all(s.each for s in look.values())]
    if len(close) < LOOKS_AT_LEAST:
        return False
    states = [(s, copies.looks[0][n]) for look in copies.looks for n, s in look.items()]
    return all(
        s.exchanged == "gradients" and s.shared == s.step + 1 and s.averaged == first.averaged
        for s, first in states
    ) and all(s.averaged == copies.looks[0][n].averaged for n, s in (copies.end or {}).items())


def _agreed(copies: Copies) -> bool:
    """Whether gradients were equal on all ranks at every look, and new each time, and enough was
    communicated in each step to make them so, by whatever means: there may be no backward."""
    looks = close_looks(copies)
    if len(looks) < LOOKS_AT_LEAST or any(len(set(look.gradients)) > 1 for look in looks):
        return False
    size = sum(_sizes(copies))
    return len({look.gradients[0] for look in looks}) == len(looks) and all(
        s.elements >= ENOUGH * size * s.step for s in copies.looks[-1].values()
    )


def close_looks(copies: Copies) -> list[Look]:
    """The looks for which every rank recorded one digest per parameter."""
    sizes = _sizes(copies)
    looks = [look for look in copies.looks if all(s.each for s in look.values())]
    return [_look(look, sizes) for look in looks]


def _look(rows: Mapping[int, UnwrappedState], sizes: list[int]) -> Look:
    count = len(sizes)
    each = [tuple(unpack(s.each)) for s in rows.values()]
    own = [frozenset(unpack(s.handed)) for s in rows.values()]
    unknown = [size for i, size in enumerate(sizes) if i not in frozenset.union(*own)]
    return Look(
        step=next(iter(rows.values())).step,
        gradients=[row[:count] for row in each],
        parameters=[row[count : 2 * count] for row in each],
        own=own,
        reported=all(s.other < min(unknown, default=1) for s in rows.values()),
    )


def _sizes(copies: Copies) -> list[int]:
    return [prod(p.shape) for p in _parameters(copies)]


def _parameters(copies: Copies) -> tuple[Tensor, ...]:
    return member(copies)[1].parameters


def member(copies: Copies) -> tuple[Rank, Unwrapped]:
    """The first rank, and its record of the model."""
    return next(iter(copies.members.values()))


def _mixed(looks: list[Look]) -> tuple[Look, list[int]] | None:
    """A step in which each rank passed the gradients it had to collectives, of different
    parameters, and the positions of these; some of them have differed since."""
    for look in looks:
        had = [{i for i, g in enumerate(row) if g != ABSENT} for row in look.gradients]
        if had != look.own:
            continue
        lone = sorted(look.passed - frozenset.intersection(*look.own))
        later = [other for other in looks if other.step > look.step]
        if any(not other.equal(i) for other in later for i in lone):
            return look, lone
    return None


def _never_equal(copies: Copies, looks: list[Look]) -> list[int] | None:
    """The parameters that differ from the first step on, although all gradients are synchronised;
    None where there are none."""
    if not (all(s.complete for look in copies.looks for s in look.values()) or _agreed(copies)):
        return None
    count = len(_parameters(copies))
    agree = all(
        look.agree(i) for look in looks for i in range(count) if any(r[i] for r in look.gradients)
    )
    unequal = [
        i
        for i in range(count)
        if all(look.everywhere(i) and not look.equal(i) for look in looks)
        and any(look.gradients[0][i] != ALL_ZERO for look in looks)
    ]
    return unequal if agree and unequal and moved(looks, unequal) else None


def _left_out(copies: Copies, looks: list[Look]) -> tuple[list[int], list[int]] | None:
    """The parameters that were equal and diverge, as their gradients are never synchronised; and
    those whose gradients are. None where it is not so."""
    first = looks[0]
    count = len(_parameters(copies))
    if not all(first.equal(i) for i in range(count)):
        return None
    agree = _agreeing(looks)
    always = frozenset.intersection(*(look.passed for look in looks))
    shared = sorted(always | set(agree))
    if not agree and not all(look.reported for look in looks):
        return None
    ever = frozenset.union(*(look.passed for look in looks))
    local = [
        i
        for i in range(count)
        if i not in ever
        and all(look.everywhere(i) and not look.agree(i) for look in looks)
        and _diverges(looks, i)
    ]
    sizes = _sizes(copies)
    enough = sum(sizes[i] for i in shared) >= ENOUGH * sum(sizes)
    return (local, shared) if local and enough and moved(looks, local) else None


def _diverges(looks: list[Look], position: int) -> bool:
    """Whether a parameter was equal, and is not from some look on, which is not the last. Adam's
    first update may still be equal: it depends on the sign of the gradient only."""
    equal = [look.equal(position) for look in looks]
    begin = equal.index(False) if False in equal else len(equal)
    return 0 < begin < len(equal) - 1 and not any(equal[begin:])


def _agreeing(looks: list[Look]) -> list[int]:
    """The positions whose gradients are equal on all ranks. A look at which none is does not count:
    gradients are clipped by a norm of all, including those that are not synchronised."""
    every = range(len(looks[0].gradients[0]))
    some = [look for look in looks if any(look.agree(i) for i in every)]
    if len(some) < LOOKS_AT_LEAST or some[0] is not looks[0]:
        return []
    return [
        i
        for i in every
        if all(look.everywhere(i) for look in looks)
        and all(look.agree(i) for look in some)
        and any(look.gradients[0][i] != ALL_ZERO for look in looks)
    ]


def moved(looks: list[Look], positions: list[int]) -> bool:
    """Whether any of these parameters changes between the first look and the last."""
    return any(looks[0].parameters[0][i] != looks[-1].parameters[0][i] for i in positions)


def theirs(positions: list[int]) -> str:
    """`its gradient`, or `their gradients` for several parameters."""
    return plural(len(positions), "its gradient", "their gradients")


def layer_of(name: str) -> str:
    """The module that owns a parameter."""
    return name.rpartition(".")[0]


MEANT = "; they are whole layers, so this may be intended (heads of their own)"
"""Ends the cause where whole layers are not synchronised."""


def _never_synced(
    copies: Copies, looks: list[Look], local: list[int], shared: list[int]
) -> dict[str, Any]:
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    layers = {layer_of(names[i]) for i in shared} - {""}
    torn = [i for i in local if layer_of(names[i]) in layers]
    kind = event.kind or "a set of parameters"
    begin = next(look.step for look in looks if not all(map(look.equal, local)))
    site = copies.looks[0][rank.rank].exchange_site
    drift = [i for i in range(len(names)) if not looks[-1].equal(i)]
    along = not set(drift).isdisjoint(shared)
    example = _example(names, torn, shared)
    proven = bool(torn or along)
    owner = "" if proven or not _made_equal(copies) else _rest_of(names, local, shared)
    wrong = proven or bool(owner)
    remark = MEANT
    if owner:
        remark = (
            "; before the first step a collective carried all parameters, including these, and "
            f"they are a part of {owner}: the ranks are to train one model"
        )
    return fields(copies, begin) | {
        "rule": NEVER_SYNCED,
        "severity": Severity.ERROR if wrong else Severity.NOTE,
        "confidence": Confidence.SUSPECTED if owner else Confidence.PROVEN,
        "subjects": tuple(names[i] for i in local),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": "does not include their gradients",
        "related": related(rank, "created here", event.site),
        "summary": f"{named(names, local)} of {kind} {verb(local)} from step {begin} on: the "
        f"program's own all-reduce does not include {theirs(local)}",
        "cause": f"the gradients of {len(shared)} of {len(names)} parameters are synchronised in "
        f"every step, those of {len(local)} never: each rank applies its own"
        + (f"; {example}" if example else "")
        + (
            "; the others differ as a result: a value computed from all gradients (a norm to clip "
            "by) or parameters differs between ranks"
            if along
            else ""
        )
        + ("" if proven else remark),
        "fix": SYNC_ALL
        if wrong
        else "if the ranks are to train one model, all-reduce the gradients of these layers, too",
        "evidence": {
            "gradients_synchronised": len(shared),
            "gradients_not_synchronised": len(local),
            "parameters_that_differ_now": len(drift),
            "steps_compared": [look.step for look in looks],
        },
    }


SYNC_ALL = (
    "all-reduce the gradient of every parameter: `for p in model.parameters(): "
    "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
)


def _example(names: list[str], torn: list[int], shared: list[int]) -> str:
    """Names two parameters of one layer that are treated differently; empty for none."""
    if not torn:
        return ""
    owner = layer_of(names[torn[0]])
    synced = next(names[i] for i in shared if layer_of(names[i]) == owner)
    return f"that of {synced} is synchronised, that of {names[torn[0]]} in the same layer is not"


def _made_equal(copies: Copies) -> bool:
    """Whether a collective of these ranks carried all of the parameters before the first step."""
    first = copies.looks[0]
    groups = (members_of(rank, first[n].spread) for n, (rank, _) in copies.members.items())
    return all(group == copies.members.keys() for group in groups)


def _rest_of(names: list[str], local: list[int], shared: list[int]) -> str:
    """The part of the model of which `local` are the rest, as a bucket that is never full leaves
    it: consecutive parameters of one part, others of which are synchronised. Empty where it is not
    so: layers of one kind are not consecutive, and a head is a part by itself."""
    owners = {names[i].partition(".")[0] for i in local if "." in names[i]}
    consecutive = local == list(range(local[0], local[-1] + 1))
    others = {names[i].partition(".")[0] for i in shared}
    return owners.pop() if consecutive and len(owners) == 1 and owners <= others else ""


def _mismatched(copies: Copies, look: Look, lone: list[int]) -> dict[str, Any]:
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    kind = event.kind or "a set of parameters"
    site = copies.looks[0][rank.rank].exchange_site
    without = {
        number: [i for i in lone if i not in own]
        for number, own in zip(copies.members, look.own, strict=True)
    }
    number, missing = next((n, m) for n, m in without.items() if m)
    return fields(copies, look.step) | {
        "rule": MISMATCHED,
        "severity": Severity.ERROR,
        "subjects": tuple(names[i] for i in lone),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": "pairs gradients of different parameters",
        "related": related(rank, "created here", event.site),
        "summary": f"{named(names, lone)} of {kind} {verb(lone)}: at step {look.step} the ranks "
        "all-reduce gradients of different parameters with each other",
        "cause": f"{named(names, missing)} got no gradient on rank {number}, which therefore "
        "passes other tensors to the collectives than the other ranks. Collectives pair tensors "
        "by their order, so that gradients of different parameters are summed",
        "fix": "pass a tensor for every parameter: `if p.grad is None: p.grad = "
        "torch.zeros_like(p)` before the all-reduce",
        "evidence": {
            "without_a_gradient": [
                {"rank": n, "parameters": named(names, m)} for n, m in without.items() if m
            ],
            "steps_compared": [
                s for s in (next(iter(row.values())).step for row in copies.looks) if s >= look.step
            ][:20],
        },
    }


def _not_awaited(copies: Copies, differ: Rows) -> dict[str, Any]:
    rank, event = member(copies)
    begin = next(iter(differ.values())).step
    last = copies.looks[-1]
    number = next(n for n, s in last.items() if s.running)
    ran = copies.members[number][0]
    kind = event.kind or "a set of parameters"
    return fields(copies, begin) | {
        "rule": NOT_AWAITED,
        "severity": Severity.ERROR,
        "subjects": tuple(p.name for p in event.parameters),
        "location": ran.location(last[number].running_site) or rank.location(event.step_site),
        "label": "still running when the optimizer applies the gradients",
        "related": related(rank, "applied here", event.step_site),
        "summary": f"parameters of {kind} differ between ranks from step {begin} on: their "
        "gradients are applied before their all-reduce has finished",
        "cause": "the collective is asynchronous and the program does not wait for it: each rank "
        "applies what has arrived by then, its own gradients, the reduced ones or a mixture",
        "fix": "wait for every collective before the gradients are used: `for work in works: "
        "work.wait()`, or remove `async_op=True`",
        "evidence": {
            "steps_that_ended_before_a_collective_did": [
                {"rank": n, "steps": s.running} for n, s in last.items() if s.running
            ],
            "steps_compared": [next(iter(look.values())).step for look in copies.looks][:20],
        },
    }


def _unequal_start(copies: Copies, looks: list[Look], unequal: list[int]) -> dict[str, Any]:
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    kind = event.kind or "a set of parameters"
    return fields(copies, looks[0].step) | {
        "rule": UNEQUAL_START,
        "severity": Severity.ERROR,
        "subjects": tuple(names[i] for i in unequal),
        "location": rank.location(event.site) or rank.location(event.step_site),
        "label": "differs between ranks from the start",
        "related": related(rank, "applied here", event.step_site if event.kind else -1),
        "summary": f"{named(names, unequal)} of {kind} {verb(unequal)} before the first step "
        "and from then on: only gradients are synchronised",
        "cause": "the ranks start from different values (another seed, weights loaded on some "
        "ranks only) and apply the same gradients to them: the initial difference remains",
        "fix": "broadcast the parameters before the first step: `for p in "
        "model.parameters(): dist.broadcast(p.data, src=0)`",
        "evidence": {
            "parameters_that_differ": f"{len(unequal)} of {len(names)}",
            "gradients": "agree",
            "steps_compared": [look.step for look in looks],
        },
    }


def fields(copies: Copies, begin: int) -> dict[str, Any]:
    """Fields that findings about manual synchronisation have in common; `begin`: the first step."""
    last = max(begin, max(r.steps_of(e.optimizer) for r, e in copies.members.values()) - 1)
    return {
        "ranks": tuple(copies.members),
        "steps": Steps(begin, last, last - begin + 1),
        "fix_kind": FixKind.CHECK,
        "at": _at(copies, begin),
    }


def related(rank: Rank, label: str, site: int) -> tuple[Related, ...]:
    """A related line; empty where it is not known."""
    spot = rank.location(site)
    return (Related(label, spot),) if spot is not None else ()


def _at(copies: Copies, step: int) -> float:
    def wall(number: int, rank: Rank) -> float:
        look = next(look for look in copies.looks if look[number].step == step)
        return rank.wall(look[number].at)

    return min(wall(n, r) for n, (r, _) in copies.members.items())


def verb(positions: list[int]) -> str:
    """`differs between ranks`, or `differ` for several parameters."""
    return f"{plural(len(positions), 'differs', 'differ')} between ranks"
