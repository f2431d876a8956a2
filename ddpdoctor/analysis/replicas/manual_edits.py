"""What the program itself did to copies, and on which ranks: their values before and after tell."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from ...events import Clipped, Edited
from ...run import Location, Rank, equal_ranks, odd_ones, ranks_do, ranks_text
from .causes import ROUNDING, Cause, largest
from .divergence_window import parted
from .replica import Member
from .replicas import Divergence, Replicas, by_step


def edited(group: Replicas, kind: str, found: Divergence) -> Cause | None:
    """Some ranks, not all, changed these tensors by hand at the step where they first differ."""
    first = found.first
    seen = {n: e for n, m in group.members.items() if (e := _edit(group, n, kind, first))}
    changing = _beyond_the_usual({n: e for n, e in seen.items() if e.changed}, group)
    if not changing or (len(changing) == len(group.members) and _alike(changing)):
        return None
    if kind == "parameters" and not _since(group, found, changing):
        return None
    if (cause := _left_out(group, kind, seen, changing)) is not None:
        return cause
    if (cause := _called(group, kind, first, seen, changing)) is not None:
        return cause
    if (cause := _unscaled(group, changing)) is not None:
        return cause
    ranks = tuple(sorted(changing))
    others = ""
    if len(ranks) == len(group.members):
        ranks = _unlike_most(changing)
        how = ", ".join(f"rank {n} by {e.ratio:g}" for n, e in changing.items() if e.ratio)
        text = (
            f"every rank edits its {kind} "
            + (
                "in its own way"
                if len(ranks) == len(changing)
                else f"by hand, {ranks_text(ranks)} "
                f"{'in another way' if len(ranks) == 1 else 'in other ways'} than most"
            )
            + (f" ({how})" if how else "")
        )
    else:
        text = f"{ranks_do(ranks, 'edit')} {kind} by hand"
        others = "; the others do not"
        rest = [e for n, e in seen.items() if n not in ranks]
        if rest and all(e.undone for e in rest):
            others = "; the others put back what they change"
        elif rest and all(e.changed and e.site >= 0 for e in rest):
            others = "; what the others do to them, all ranks do"
    functions = sorted({f for e in changing.values() for f in e.functions})
    if functions and not all(e.beside for e in changing.values()):
        others += f"; called meanwhile: {', '.join(functions)}"
    event, member = changing[ranks[0]], group.members[ranks[0]]
    own = own_line(group, kind, first, ranks) if event.more else None
    spot = own or _spot(member.rank, event, functions)
    moment, before = _MOMENT[kind if kind == "gradients" or event.step else "first parameters"]
    everybody, put_back = len(changing) == len(group.members), False
    fix = "do it on every rank with the same numbers, or not at all"
    if kind == "parameters" and _goes_on(member, kind, event.step):
        moment = f"in every step from step {event.step} on"
        if largest(group, found) == ROUNDING:
            copy = "put back what is changed for a moment only from a copy of it (`p.copy_(kept)`)"
            copy += ": to subtract what was added leaves rounding errors"
            put_back = everybody
            fix = copy if put_back else f"{fix}; {copy}"
    elif before == "the wrap":
        fix = "do it before `DistributedDataParallel(...)`, which copies rank 0's parameters"
    return Cause(
        text=f"{text} {moment}, after DDP made them equal{others}",
        fix=fix,
        label=f"edits {kind} on {ranks_text(ranks)}"
        if spot
        else f"{kind} of {ranks_text(ranks)} are not what {before} left",
        location=spot,
        ranks=ranks,
        evidence={"edited_by_hand_on": sorted(changing)},
        everybody=everybody,
        put_back=put_back,
    )


def _since(group: Replicas, found: Divergence, changing: dict[int, Edited]) -> bool:
    """Whether any of these, if not all ranks make them, came after the copies were equal."""
    if len(changing) == len(group.members):
        return True
    steps = parted(group, found)
    return any(e.step in steps for e in changing.values())


_MOMENT = {
    "gradients": ("between the backward and the step", "the backward"),
    "parameters": ("between two steps", "the step before"),
    "first parameters": ("between the wrap and the first step", "the wrap"),
}


def _goes_on(member: Member, kind: str, step: int) -> bool:
    """Whether it is edited before every step after this one, too."""
    steps = range(step + 1, member.last_step + 1)
    later = {e.step: e.changed for e in edits_of(member, kind) if e.step in steps}
    return bool(later) and all(later.values())


def _left_out(
    group: Replicas, kind: str, seen: dict[int, Edited], changing: dict[int, Edited]
) -> Cause | None:
    """The others make the same edits at the same lines, and one more, which takes them back."""
    others = {n: e for n, e in seen.items() if e.undone and n not in changing}
    if not others or len(others) + len(changing) < len(group.members):
        return None
    rows = [(group.members[n].rank, e) for n, e in others.items()]
    whole = [_lines(rank, event) for rank, event in rows]
    parts = [_lines(group.members[n].rank, e) for n, e in changing.items()]
    missing = [s for s in whole[0] if all(s in w for w in whole) and not any(s in p for p in parts)]
    if not missing or not all(part and set(part) <= set(whole[0]) for part in parts):
        return None
    ranks = tuple(sorted(changing))
    spot = missing[-1]
    there = ranks_text(tuple(sorted(others)))
    return Cause(
        text=f"every rank edits {kind} by hand {_MOMENT[kind][0]}; on {there} line {spot.line} "
        f"puts back what they were, on {ranks_text(ranks)} it does not, or not of all of them",
        fix="put them back on every rank alike",
        label=f"left out on {ranks_text(ranks)}, at least in part",
        location=spot,
        ranks=ranks,
        evidence={"edited_by_hand_on": list(ranks), "put_back_on": sorted(others)},
    )


def _called(
    group: Replicas, kind: str, first: int, seen: dict[int, Edited], changing: dict[int, Edited]
) -> Cause | None:
    """Some ranks call a function of torch's that the others do not call, and what else they do,
    all do, as far as it is known."""
    ranks = tuple(sorted(changing))
    rest = [e for n, e in seen.items() if n not in changing and e.changed]
    names = set.intersection(*(set(e.changers) for e in changing.values()))
    names = names.difference(*(e.functions for e in rest))
    if not rest or not names or own_line(group, kind, first, ranks) is not None:
        return None
    name = min(names)
    cause = _function(group, ranks, name, changing[ranks[0]].changers[name])
    return dataclasses.replace(
        cause,
        text=f"{name} is called for them on {ranks_text(ranks)} only; what else is done to them "
        "between the backward and the step, all ranks do",
        evidence={"edited_by_hand_on": list(ranks)},
    )


def _unscaled(group: Replicas, changing: dict[int, Edited]) -> Cause | None:
    """All that is done to them is to take out loss scales, which are not the same."""
    alone = all({*e.changers} == {"unscale_"} and e.ratio for e in changing.values())
    if len(changing) < len(group.members) or not alone or any(e.beside for e in changing.values()):
        return None
    ranks = _unlike_most(changing)
    by = ", ".join(f"1/{1 / e.ratio:.5g} on rank {n}" for n, e in changing.items())
    return Cause(
        text=f"the ranks' scalers unscale them by unlike loss scales ({by}), after DDP averaged "
        "them",
        fix="make or load the scaler alike on every rank, and call `scaler.step(optimizer)` and "
        "`scaler.update()` on every rank after every backward",
        label="unscaled by unlike scales",
        location=_caller(group.members[ranks[0]].rank, changing[ranks[0]]),
        ranks=ranks,
        everybody=True,
    )


def own_line(group: Replicas, kind: str, first: int, ranks: tuple[int, ...]) -> Location | None:
    """The last line at which these ranks edit, and the others, as far as they do, do not."""
    lines: dict[int, list[Location]] = {}
    for number, member in group.members.items():
        event = _edit(group, number, kind, first)
        if event is None or not (event.changed or event.undone):
            continue
        lines[number] = _lines(member.rank, event)
        if not lines[number] and (event.beside or not event.functions):
            return None  # it was not followed
    rest = {str(spot) for number, spots in lines.items() if number not in ranks for spot in spots}
    own = [spot for spot in lines.get(ranks[0], ()) if str(spot) not in rest]
    return own[-1] if own else None


def _lines(rank: Rank, event: Edited) -> list[Location]:
    """Of an edit, as far as it was followed."""
    sites = (event.site, *event.more)
    return [spot for site in sites if (spot := rank.location(site)) is not None]


def edited_once(group: Replicas, found: Divergence, kind: str = "parameters") -> Cause | None:
    """The ranks that stand apart, and only they, changed parameters, or the optimizer's state, by
    hand some time before that was seen: not every tensor is compared at every step."""
    steps = parted(group, found)
    last: dict[int, Edited] = {}
    for number, member in group.members.items():
        for event in edits_of(member, kind):
            if event.changed and event.step in steps:
                last[number] = event
    everybody, ranks = tuple(sorted(group.members)), tuple(sorted(last))
    apart = tuple(sorted(found.minority))
    if apart == everybody:
        apart = ranks  # no majority: whoever changed something, and not everybody
    if not ranks or ranks != apart or ranks == everybody:
        return None
    member, event = group.members[ranks[0]], last[ranks[0]]
    what = "the optimizer's state" if kind == "state" else "parameters"
    if event.site < 0:  # followed at a later time
        later = (e for e in edits_of(member, kind) if e.step > event.step and e.site >= 0)
        event = replace(event, site=next((e.site for e in later), -1))
    return Cause(
        text=f"{ranks_do(ranks, 'edit')} {what} by hand before step {event.step}, "
        "the others do not",
        fix="do it on every rank with the same numbers, or not at all",
        label=f"{what} of {ranks_text(ranks)} {'is' if kind == 'state' else 'are'} not what step "
        f"{event.step - 1} left",
        location=_spot(member.rank, event, sorted(event.functions)),
        ranks=ranks,
        evidence={"edited_by_hand_on": list(ranks), "edited_before_step": event.step},
    )


def before_the_step(group: Replicas, found: Divergence) -> Cause | None:
    """Parameters that differ came of a step in which some ranks, for the first time, edited
    gradients, and the others did not: not all gradients are compared in every step."""
    parameters = parted(group, found)
    steps = range(max(0, parameters.start - 1), parameters.stop - 1)
    edits = {
        n: [e for e in edits_of(m, "gradients") if e.changed] for n, m in group.members.items()
    }
    for step in sorted({e.step for mine in edits.values() for e in mine if e.step in steps}):
        cause = edited(group, "gradients", dataclasses.replace(found, keys=[step]))
        if cause is None or cause.everybody or _all_compared(group, step, found.total):
            continue
        apart = set(found.minority) in ({*group.members}, {*cause.ranks})
        rest = [e for n, mine in edits.items() if n not in cause.ranks for e in mine]
        now = [e for n in cause.ranks for e in edits[n] if e.step == step]
        known = [e for n in cause.ranks for e in edits[n] if e.step < steps.start]
        if (
            apart
            and now
            and not any(_same_kind(e, other) for e in now for other in (*rest, *known))
        ):
            return dataclasses.replace(
                cause,
                text=f"at step {step}, of whose gradients not all were compared, {cause.text}",
                evidence=cause.evidence | {"gradients_edited_at_step": step},
            )
    return None


def _all_compared(group: Replicas, step: int, count: int) -> bool:
    """Whether all gradients of a step were, and were equal then."""
    rows = [by_step(m, "gradients", count).get(step, ({}, 0))[0] for m in group.members.values()]
    return len(set.intersection(*(set(row) for row in rows))) == count


def _same_kind(one: Edited, other: Edited) -> bool:
    """As far as it is known: of an edit by hand, the line may not be."""
    return (one.beside, set(one.functions)) == (other.beside, set(other.functions))


def _beyond_the_usual(edits: dict[int, Edited], group: Replicas) -> dict[int, Edited]:
    """Without ranks that only do what all do, at the same lines or by calling the same functions
    (`unscale_`, clipping), where others do more."""
    if len(edits) < len(group.members):
        return edits
    usual = set.intersection(*(set(e.functions) for e in edits.values()))
    more = {n: e for n, e in edits.items() if usual and (e.beside or set(e.functions) - usual)}
    if 0 < len(more) < len(edits):
        return more
    lines = {n: {str(s) for s in _lines(group.members[n].rank, e)} for n, e in edits.items()}
    common = set.intersection(*lines.values())
    if own := {n: e for n, e in edits.items() if common and lines[n] - common}:
        return own
    if all(found in (common, set()) for found in lines.values()):
        more = {n: e for n, e in edits.items() if _own_functions(edits, n)} or more
    return more or edits


def _own_functions(edits: dict[int, Edited], number: int) -> set[str]:
    """What changes them on this rank and is called on no other."""
    others = (e.functions for n, e in edits.items() if n != number)
    return set(edits[number].changers).difference(*others)


def _unlike_most(edits: dict[int, Edited]) -> tuple[int, ...]:
    """Those that multiply by another number than most others; all where there is no such number."""
    same = equal_ranks({n: (f"{e.ratio:.4g}",) for n, e in edits.items()})
    known = edits[same[0][0]].ratio
    return (odd_ones(same) if known else ()) or tuple(sorted(edits))


def _alike(edits: dict[int, Edited]) -> bool:
    """Whether all ranks seem to make the same edit: one ratio, or a function of torch's."""
    ratios = {f"{e.ratio:.4g}" for e in edits.values()}
    same = len(ratios) == 1 and len({e.functions for e in edits.values()}) == 1
    return same and any(e.ratio or e.functions for e in edits.values())


def _edit(group: Replicas, number: int, kind: str, first: int) -> Edited | None:
    """The latest word on edits of this rank at a step, with the line that a later one may know."""
    mine = edits_of(group.members[number], kind)
    now = next((e for e in reversed(mine) if e.step <= first), None)
    if now is None or now.site >= 0 or not (now.changed or now.undone):
        return now
    alike = (now.changed, now.beside, now.undone)
    later = (e for e in mine if e.step > first and (e.changed, e.beside, e.undone) == alike)
    known = next((e for e in later if e.site >= 0), now)
    return replace(now, site=known.site, more=known.more)


def edits_of(member: Member, kind: str) -> list[Edited]:
    """What was told of a kind."""
    of = member.model, member.optimizer, kind
    return [e for e in member.rank.of(Edited) if (e.model, e.optimizer, e.kind) == of]


def _spot(rank: Rank, event: Edited, functions: list[str]) -> Location | None:
    if (found := rank.location(event.site)) is not None:
        return found
    if event.kind != "gradients" or event.beside:
        return None  # it was not, or not only, the clipping
    if (known := _caller(rank, event)) is not None:
        return known
    clipped = next((c for c in rank.of(Clipped) if c.function in functions), None)
    return rank.location(clipped.site) if clipped else None


def _caller(rank: Rank, event: Edited) -> Location | None:
    spots = (rank.location(site) for site in event.changers.values())
    return next((spot for spot in spots if spot is not None), None)


def clipped(group: Replicas) -> Cause | None:
    """Some ranks clip, others never do."""
    calls = {n: c for n, m in group.members.items() if (c := m.rank.first(Clipped))}
    if not calls or len(calls) == len(group.members):
        return None
    ranks = tuple(sorted(calls))
    call = calls[ranks[0]]
    return _function(group, ranks, call.function, call.site)


def _function(group: Replicas, ranks: tuple[int, ...], name: str, site: int) -> Cause:
    """These ranks call it, and no others."""
    return Cause(
        text=f"{name} is called on {ranks_text(ranks)} only",
        fix=f"call {name} on every rank: gradients are equal there, so is the norm",
        label="not called on the other ranks",
        location=group.members[ranks[0]].rank.location(site),
        ranks=ranks,
    )
