"""Copies without a wrapper that the exchange by hand cannot keep equal: it leaves some of their
gradients out, is not waited for, or they were not equal to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...events import Tensor, Unwrapped, UnwrappedState
from ...events.pack import unpack
from ...report.findings import Confidence, FixKind, Related, Severity, Steps
from ...run import Rank, Run, named
from . import kept_equal
from .kept_equal import Copies, Rows

ABSENT = 0
ALL_ZERO = 1
"""The digest of a tensor of zeros."""

LOOKS_AT_LEAST = 3
ENOUGH = 0.5
"""Share of the elements whose gradients are exchanged."""

NAMED = 4


@dataclass(frozen=True)
class Look:
    """What every rank had before one step, by rank, one number per parameter.

    Attributes:
        own: positions whose gradients a rank handed over by themselves, by rank; `handed` those of
            any rank; `reported` whether all that was handed over is known so.
    """

    step: int
    gradients: list[tuple[int, ...]]
    parameters: list[tuple[int, ...]]
    own: list[frozenset[int]]
    reported: bool

    @property
    def handed(self) -> frozenset[int]:
        return frozenset.union(*self.own)

    def equal(self, position: int) -> bool:
        return len({row[position] for row in self.parameters}) == 1

    def agree(self, position: int) -> bool:
        return len({row[position] for row in self.gradients}) == 1

    def everywhere(self, position: int) -> bool:
        return all(row[position] != ABSENT for row in self.gradients)


def compared(run: Run) -> bool:
    """Whether there are copies that can be judged."""
    return any(steady(c) or _running(c) or _agreed(c) for c in kept_equal.trained_alike(run))


def reported(run: Run) -> Iterator[dict[str, Any]]:
    """The fields of findings."""
    for copies in kept_equal.trained_alike(run):
        if (differ := _running(copies)) is not None:
            yield _reported_running(copies, differ)
            continue
        looks = close_looks(copies)
        if not steady(copies):
            if _agreed(copies) and (apart := _never_equal(copies, looks)) is not None:
                yield _reported_apart(copies, looks, apart)
            continue
        if (mixed := _mixed(looks)) is not None:
            yield _reported_mixed(copies, *mixed)
        elif (apart := _never_equal(copies, looks)) is not None:
            yield _reported_apart(copies, looks, apart)
        elif (local := _left_out(copies, looks)) is not None:
            yield _reported_left_out(copies, looks, *local)


def _running(copies: Copies) -> Rows | None:
    """Where copies that were equal part, if their gradients were applied while the exchange ran."""
    first = next((i for i, look in enumerate(copies.looks) if not kept_equal.same(look)), 0)
    parted = first and not any(kept_equal.same(look) for look in copies.looks[first:])
    ran = any(s.running for look in copies.looks for s in look.values())
    return copies.looks[first] if parted and ran else None


def steady(copies: Copies) -> bool:
    """Whether all ranks exchanged most of the gradients of each and every step, and never the
    parameters since the first."""
    close = [look for look in copies.looks if all(s.each for s in look.values())]
    if len(close) < LOOKS_AT_LEAST:
        return False
    states = [(s, copies.looks[0][n]) for look in copies.looks for n, s in look.items()]
    return all(
        s.exchanged == "gradients" and s.shared == s.step + 1 and s.averaged == first.averaged
        for s, first in states
    ) and all(s.averaged == copies.looks[0][n].averaged for n, s in (copies.end or {}).items())


def _agreed(copies: Copies) -> bool:
    """Whether gradients were the same on all ranks at every look, others each time, and so much was
    exchanged in each step that they were, by whatever means: there may have been no backward."""
    looks = close_looks(copies)
    if len(looks) < LOOKS_AT_LEAST or any(len(set(look.gradients)) > 1 for look in looks):
        return False
    size = sum(_sizes(copies))
    return len({look.gradients[0] for look in looks}) == len(looks) and all(
        s.elements >= ENOUGH * size * s.step for s in copies.looks[-1].values()
    )


def close_looks(copies: Copies) -> list[Look]:
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
    return next(iter(copies.members.values()))


def _mixed(looks: list[Look]) -> tuple[Look, list[int]] | None:
    """A step in which each rank handed over what gradients it had, and they were of different
    parameters, of which some have differed since."""
    for look in looks:
        had = [{i for i, g in enumerate(row) if g != ABSENT} for row in look.gradients]
        if had != look.own:
            continue
        lone = sorted(look.handed - frozenset.intersection(*look.own))
        later = [other for other in looks if other.step > look.step]
        if any(not other.equal(i) for other in later for i in lone):
            return look, lone
    return None


def _never_equal(copies: Copies, looks: list[Look]) -> list[int] | None:
    """Parameters that differ from the first step on, although the same gradients are applied to
    them on all ranks: those of all parameters are exchanged."""
    if not (all(s.complete for look in copies.looks for s in look.values()) or _agreed(copies)):
        return None
    count = len(_parameters(copies))
    alike = all(
        look.agree(i) for look in looks for i in range(count) if any(r[i] for r in look.gradients)
    )
    apart = [
        i
        for i in range(count)
        if all(look.everywhere(i) and not look.equal(i) for look in looks)
        and any(look.gradients[0][i] != ALL_ZERO for look in looks)
    ]
    return apart if alike and apart and moved(looks, apart) else None


def _left_out(copies: Copies, looks: list[Look]) -> tuple[list[int], list[int]] | None:
    """Parameters that were equal and drift, as their gradients alone are not exchanged; and those
    whose gradients are."""
    first = looks[0]
    count = len(_parameters(copies))
    if not all(first.equal(i) for i in range(count)):
        return None
    agree = _agreeing(looks)
    handed = frozenset.intersection(*(look.handed for look in looks))
    shared = sorted(handed | set(agree))
    if not agree and not all(look.reported for look in looks):
        return None
    ever = frozenset.union(*(look.handed for look in looks))
    local = [
        i
        for i in range(count)
        if i not in ever
        and all(look.everywhere(i) and not look.agree(i) for look in looks)
        and _parts(looks, i)
    ]
    sizes = _sizes(copies)
    enough = sum(sizes[i] for i in shared) >= ENOUGH * sum(sizes)
    return (local, shared) if local and enough and moved(looks, local) else None


def _parts(looks: list[Look], position: int) -> bool:
    """Whether it was equal, and is not from some look on, which is not the last. The first update
    of Adam may still be the same: it has the sign of the gradient only."""
    equal = [look.equal(position) for look in looks]
    begin = equal.index(False) if False in equal else len(equal)
    return 0 < begin < len(equal) - 1 and not any(equal[begin:])


def _agreeing(looks: list[Look]) -> list[int]:
    """Positions whose gradients are the same on all ranks. Where none is they were exchanged, too:
    they are clipped by a norm of all gradients, those that are not exchanged among them."""
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
    return any(looks[0].parameters[0][i] != looks[-1].parameters[0][i] for i in positions)


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def _reported_left_out(
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
    remark = "; they are whole layers, so this may be meant (heads of their own)"
    if owner:
        remark = (
            "; before the first step a collective carried all parameters, theirs among them, and "
            f"they are a part of {owner}: one model is meant"
        )
    return fields(copies, begin) | {
        "severity": Severity.ERROR if wrong else Severity.NOTE,
        "confidence": Confidence.SUSPECTED if owner else Confidence.PROVEN,
        "subjects": tuple(names[i] for i in local),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": "leaves their gradients out",
        "related": related(rank, "made here", event.site),
        "summary": f"{named(names, local)} of {kind} {verb(local)} from step {begin} on: of the "
        "gradients that the program exchanges by hand, theirs are left out",
        "cause": f"the gradients of {len(shared)} of {len(names)} parameters are exchanged in "
        f"every step, those of {len(local)} never: each rank applies its own to them"
        + (f"; {example}" if example else "")
        + (
            "; the others part with them: what is made of all gradients (a norm to clip by) or "
            "parameters differs between ranks"
            if along
            else ""
        )
        + ("" if proven else remark),
        "fix": "exchange the gradient of every parameter: `for p in model.parameters(): "
        "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()`"
        if wrong
        else "if the ranks are to train one model, exchange the gradients of these layers too",
        "evidence": {
            "gradients exchanged": len(shared),
            "gradients left out": len(local),
            "parameters that differ now": len(drift),
            "steps compared": [look.step for look in looks],
        },
    }


def _example(names: list[str], torn: list[int], shared: list[int]) -> str:
    if not torn:
        return ""
    owner = layer_of(names[torn[0]])
    beside = next(names[i] for i in shared if layer_of(names[i]) == owner)
    return f"{beside} is exchanged and {names[torn[0]]} of the same layer is not"


def _made_equal(copies: Copies) -> bool:
    """Whether a collective of these ranks carried all of the parameters before the first step."""
    first = copies.looks[0]
    groups = (
        kept_equal.members_of(rank, first[n].spread) for n, (rank, _) in copies.members.items()
    )
    return all(group == copies.members.keys() for group in groups)


def _rest_of(names: list[str], local: list[int], shared: list[int]) -> str:
    """The part of the model that these are the rest of, as a bucket that is never full leaves it:
    they stand in a row, in one part, others of which are exchanged. Layers of one kind do not, nor
    does a head that is a part by itself."""
    owners = {names[i].partition(".")[0] for i in local if "." in names[i]}
    in_a_row = local == list(range(local[0], local[-1] + 1))
    others = {names[i].partition(".")[0] for i in shared}
    return owners.pop() if in_a_row and len(owners) == 1 and owners <= others else ""


def _reported_mixed(copies: Copies, look: Look, lone: list[int]) -> dict[str, Any]:
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
        "severity": Severity.ERROR,
        "subjects": tuple(names[i] for i in lone),
        "location": rank.location(site) or rank.location(event.step_site),
        "label": "pairs gradients of different parameters",
        "related": related(rank, "made here", event.site),
        "summary": f"{named(names, lone)} of {kind} {verb(lone)}: at step {look.step} the ranks "
        "exchange gradients of different parameters",
        "cause": f"{named(names, missing)} got no gradient on rank {number}, which therefore hands "
        "over other tensors than its peers; collectives pair tensors by their order, and so "
        "gradients of different parameters are summed up",
        "fix": "hand over a tensor for every parameter: `if p.grad is None: p.grad = "
        "torch.zeros_like(p)` before the exchange",
        "evidence": {
            "without a gradient": [
                {"rank": n, "parameters": named(names, m)} for n, m in without.items() if m
            ],
            "steps compared": [
                s for s in (next(iter(row.values())).step for row in copies.looks) if s >= look.step
            ][:20],
        },
    }


def _reported_running(copies: Copies, differ: Rows) -> dict[str, Any]:
    rank, event = member(copies)
    begin = next(iter(differ.values())).step
    last = copies.looks[-1]
    number = next(n for n, s in last.items() if s.running)
    ran = copies.members[number][0]
    kind = event.kind or "a set of parameters"
    return fields(copies, begin) | {
        "severity": Severity.ERROR,
        "subjects": tuple(p.name for p in event.parameters),
        "location": ran.location(last[number].running_site) or rank.location(event.step_site),
        "label": "still runs when the optimizer applies what it carries",
        "related": related(rank, "applied here", event.step_site),
        "summary": f"parameters of {kind} differ between ranks from step {begin} on: their "
        "gradients are applied while they are being exchanged",
        "cause": "the exchange is asynchronous and nobody waits for its end, so that each rank "
        "applies what has arrived by then: its own gradients, the exchanged ones, or a mixture",
        "fix": "wait for every exchange before the gradients are used: `for work in works: "
        "work.wait()`, or leave `async_op=True` out",
        "evidence": {
            "steps that ended before an exchange did": [
                {"rank": n, "steps": s.running} for n, s in last.items() if s.running
            ],
            "steps compared": [next(iter(look.values())).step for look in copies.looks][:20],
        },
    }


def _reported_apart(copies: Copies, looks: list[Look], apart: list[int]) -> dict[str, Any]:
    rank, event = member(copies)
    names = [p.name for p in event.parameters]
    kind = event.kind or "a set of parameters"
    return fields(copies, looks[0].step) | {
        "severity": Severity.ERROR,
        "subjects": tuple(names[i] for i in apart),
        "location": rank.location(event.site) or rank.location(event.step_site),
        "label": "differs between ranks from the start",
        "related": related(rank, "stepped here", event.step_site if event.kind else -1),
        "summary": f"{named(names, apart)} of {kind} {verb(apart)} before the first step, and for "
        "ever: only gradients are exchanged",
        "cause": "the ranks start from values of their own (another seed, weights loaded on some "
        "ranks only) and apply the same gradients to them: what differs at the start never gets "
        "equal",
        "fix": "give every rank the same values before the first step: `for p in "
        "model.parameters(): dist.broadcast(p.data, src=0)`",
        "evidence": {
            "parameters that differ": f"{len(apart)} of {len(names)}",
            "gradients": "agree",
            "steps compared": [look.step for look in looks],
        },
    }


def fields(copies: Copies, begin: int) -> dict[str, Any]:
    last = max(begin, max(r.steps_of(e.optimizer) for r, e in copies.members.values()) - 1)
    return {
        "ranks": tuple(copies.members),
        "steps": Steps(begin, last, last - begin + 1),
        "fix_kind": FixKind.CHECK,
        "at": _at(copies, begin),
    }


def related(rank: Rank, label: str, site: int) -> tuple[Related, ...]:
    spot = rank.location(site)
    return (Related(label, spot),) if spot is not None else ()


def _at(copies: Copies, step: int) -> float:
    def wall(number: int, rank: Rank) -> float:
        look = next(look for look in copies.looks if look[number].step == step)
        return rank.wall(look[number].at)

    return min(wall(n, r) for n, (r, _) in copies.members.items())


def verb(positions: list[int]) -> str:
    return "differs between ranks" if len(positions) == 1 else "differ between ranks"
