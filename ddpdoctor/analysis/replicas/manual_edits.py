"""Modifications that the program itself makes to gradients, parameters or optimizer state, and the
ranks that make them: known from values and write counters before and after."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from ...events import Clipped, Edited
from ...run import Location, Rank, equal_ranks, listed, odd_ones, plural, ranks_text
from .causes import SAME_EVERYWHERE, Cause, is_rounding, largest_distance
from .divergence_window import window
from .group_findings import MODIFIED_ON, RESTORED_ON
from .replica import Member
from .replicas import Divergence, Replicas, by_step

EDIT_ON_SOME = "edit-on-some-ranks"
UNEQUAL_EDITS = "unequal-edits"
INEXACT_RESTORE = "inexact-restore"
NOT_RESTORED = "not-restored"
FUNCTION_ON_SOME = "function-on-some-ranks"
UNEQUAL_UNSCALING = "unequal-unscaling"
GRADIENT_EDIT = "gradient-edit"

RULES = {
    EDIT_ON_SOME: "some ranks modify these tensors, the others do not",
    UNEQUAL_EDITS: "all ranks modify these tensors, but not in the same way",
    NOT_RESTORED: "all ranks modify these tensors, and only some restore them",
}
"""Modifications of any kind of tensor."""

GRADIENT_RULES = RULES | {
    FUNCTION_ON_SOME: "a function of torch (clipping, unscaling) is called on some ranks only",
    UNEQUAL_UNSCALING: "the ranks unscale gradients by different loss scales",
}

PARAMETER_RULES = RULES | {
    INEXACT_RESTORE: "all ranks modify and restore parameters in every step, with rounding errors",
    GRADIENT_EDIT: "some ranks modified gradients in the previous step, not all of them compared",
}

SOME = "on some ranks only"
DIFFERENTLY = "differently on the ranks"


@dataclasses.dataclass(frozen=True)
class _Moment:
    """When a kind of tensor is modified; `after` which operation; what DDP has `done` by then."""

    when: str
    after: str
    done: str


_BROADCAST = "after DDP's initial broadcast"
_GRADIENTS = _Moment(
    "between backward and optimizer step", "the backward", "after DDP averaged them"
)
_PARAMETERS = _Moment("between two optimizer steps", "the previous step", _BROADCAST)
_FIRST_PARAMETERS = _Moment("between the wrap and the first step", "the wrap", _BROADCAST)


def modify(ranks: tuple[int, ...]) -> str:
    """`rank 1 modifies`, `ranks 0,2 modify`."""
    return f"{ranks_text(ranks)} {plural(len(ranks), 'modifies', 'modify')}"


def edited(group: Replicas, kind: str, found: Divergence) -> Cause | None:
    """The modification at the step where these tensors first differ, if not all ranks make the
    same one; None where there is none.

    Args:
        kind: `gradients` or `parameters`.
    """
    first = found.first
    seen = {n: e for n, m in group.members.items() if (e := _edit(group, n, kind, first))}
    changing = _beyond_the_common({n: e for n, e in seen.items() if e.changed}, group)
    everybody = len(changing) == len(group.members)
    if not changing or (everybody and _same(changing)):
        return None
    if kind == "parameters" and not everybody:
        since = window(group, found)
        if not any(e.step in since for e in changing.values()):
            return None  # those on some ranks only came before the copies were last equal
    # The specific explanations come first: each names the line or the call.
    specific = (
        _not_restored(group, kind, seen, changing)
        or _called(group, kind, first, seen, changing)
        or _unscaled(group, changing)
    )
    if specific is not None:
        return specific
    ranks = _different_from_most(changing) if everybody else tuple(sorted(changing))
    member, event = group.members[ranks[0]], changing[ranks[0]]
    functions = sorted({f for e in changing.values() for f in e.functions})
    own = own_line(group, kind, first, ranks) if event.more else None
    spot = own or _spot(member.rank, event, functions)
    moment = _GRADIENTS if kind == "gradients" else _PARAMETERS if event.step else _FIRST_PARAMETERS
    lasting = kind == "parameters" and _goes_on(member, kind, event.step)
    rounding = lasting and is_rounding(largest_distance(group, found))
    when = f"in every step from step {event.step} on" if lasting else moment.when
    text = _all_modify(kind, ranks, changing) if everybody else f"{modify(ranks)} {kind}"
    in_turn = not everybody and spot is not None and _in_other_steps(group, kind, ranks, spot)
    also = "" if everybody else IN_OTHER_STEPS if in_turn else _the_others(seen, ranks)
    if functions and not all(e.beside for e in changing.values()):
        also += f"; functions called in between: {listed(functions)}"
    rule = EDIT_ON_SOME
    if everybody:
        rule = INEXACT_RESTORE if rounding else UNEQUAL_EDITS
    how = DIFFERENTLY if everybody else SOME
    return Cause(
        rule,
        text=f"{text} {when}, {moment.done}{also}",
        fix=_fix(rule, moment, lasting=lasting, rounding=rounding)
        + ("; where a value of each rank decides, such as a loss, all-reduce it first" * in_turn),
        label=f"modifies {kind} {how}"
        if spot
        else f"{kind} were modified after {moment.after}, {how}",
        location=spot,
        ranks=ranks,
        evidence={MODIFIED_ON: sorted(changing)},
        everybody=everybody,
    )


def _all_modify(kind: str, ranks: tuple[int, ...], changing: dict[int, Edited]) -> str:
    """How the ranks modify their tensors, where all do."""
    factors = listed([f"{e.ratio:g} on rank {n}" for n, e in changing.items() if e.ratio])
    if len(ranks) == len(changing):
        text = f"every rank modifies its {kind} differently"
    else:
        text = f"every rank modifies its {kind}, {ranks_text(ranks)} differently from most"
    return text + (f" (factors: {factors})" if factors else "")


IN_OTHER_STEPS = "; other ranks do so in other steps"


def _in_other_steps(group: Replicas, kind: str, ranks: tuple[int, ...], spot: Location) -> bool:
    """Whether all ranks that are not to blame make the modification at this line in other steps."""
    rest = [m for n, m in group.members.items() if n not in ranks]
    return all(any(spot in _lines(m.rank, e) for e in edits_of(m, kind) if e.changed) for m in rest)


def _the_others(seen: dict[int, Edited], ranks: tuple[int, ...]) -> str:
    """What the ranks do that are not to blame."""
    rest = [e for n, e in seen.items() if n not in ranks]
    if rest and all(e.undone for e in rest):
        return "; the other ranks restore what they change"
    if rest and all(e.changed and e.site >= 0 for e in rest):
        return "; all other modifications are made on every rank"
    return "; the other ranks do not"


RESTORE_FROM_COPY = (
    "restore a temporary change from a saved copy (`p.copy_(saved)`): subtracting what was added "
    "leaves rounding errors"
)


def _fix(rule: str, moment: _Moment, *, lasting: bool, rounding: bool) -> str:
    if rule == INEXACT_RESTORE:
        return RESTORE_FROM_COPY
    if rounding:
        return f"{SAME_EVERYWHERE}; {RESTORE_FROM_COPY}"
    if moment is _FIRST_PARAMETERS and not lasting:
        return (
            "modify the parameters before `DistributedDataParallel(...)`, which then broadcasts "
            "rank 0's"
        )
    return SAME_EVERYWHERE


def _goes_on(member: Member, kind: str, step: int) -> bool:
    """Whether the tensors are modified before every step after this one, too."""
    steps = range(step + 1, member.last_step + 1)
    later = {e.step: e.changed for e in edits_of(member, kind) if e.step in steps}
    return bool(later) and all(later.values())


def _not_restored(
    group: Replicas, kind: str, seen: dict[int, Edited], changing: dict[int, Edited]
) -> Cause | None:
    """The other ranks make the same modifications at the same lines, and run one more line, which
    restores the tensors."""
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
    when = (_GRADIENTS if kind == "gradients" else _PARAMETERS).when
    return Cause(
        NOT_RESTORED,
        text=f"every rank modifies {kind} {when}; line {spot.line} restores them on "
        f"{ranks_text(others)}, but not, or not fully, on {ranks_text(ranks)}",
        fix="restore them on every rank",
        label="skipped on some ranks, at least in part",
        location=spot,
        ranks=ranks,
        evidence={MODIFIED_ON: list(ranks), RESTORED_ON: sorted(others)},
    )


def _called(
    group: Replicas, kind: str, first: int, seen: dict[int, Edited], changing: dict[int, Edited]
) -> Cause | None:
    """Some ranks call a function of torch that the others do not call, and everything else is done
    on all ranks, as far as it is known."""
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
        text=f"{name} is called on them on {ranks_text(ranks)} only; everything else between "
        "backward and optimizer step is done on every rank",
        evidence={MODIFIED_ON: list(ranks)},
    )


def _unscaled(group: Replicas, changing: dict[int, Edited]) -> Cause | None:
    """The only modification is that the ranks unscale them, by different loss scales."""
    alone = all({*e.changers} == {"unscale_"} and e.ratio for e in changing.values())
    if len(changing) < len(group.members) or not alone or any(e.beside for e in changing.values()):
        return None
    ranks = _different_from_most(changing)
    by = listed([f"1/{1 / e.ratio:.5g} on rank {n}" for n, e in changing.items()])
    return Cause(
        UNEQUAL_UNSCALING,
        text="the ranks' GradScalers use different loss scales: after DDP averaged the gradients, "
        f"they are multiplied by {by}",
        fix="create or load the GradScaler identically on every rank, and call "
        "`scaler.step(optimizer)` and `scaler.update()` on every rank after every backward",
        label="unscaled by different loss scales",
        location=_caller(group.members[ranks[0]].rank, changing[ranks[0]]),
        ranks=ranks,
        everybody=True,
    )


def own_line(group: Replicas, kind: str, first: int, ranks: tuple[int, ...]) -> Location | None:
    """The last line at which these ranks modify the tensors and no other rank does; None where
    there is none, or some lines were not followed."""
    lines: dict[int, list[Location]] = {}
    for number, member in group.members.items():
        event = _edit(group, number, kind, first)
        if event is None or not (event.changed or event.undone):
            continue
        lines[number] = _lines(member.rank, event)
        if not lines[number] and (event.beside or not event.functions):
            return None  # its lines were not followed
    rest = {str(spot) for number, spots in lines.items() if number not in ranks for spot in spots}
    own = [spot for spot in lines.get(ranks[0], ()) if str(spot) not in rest]
    return own[-1] if own else None


def _lines(rank: Rank, event: Edited) -> list[Location]:
    """The lines of a modification, as far as it was followed."""
    sites = (event.site, *event.more)
    return [spot for site in sites if (spot := rank.location(site)) is not None]


def parameters(group: Replicas, found: Divergence) -> Cause | None:
    """Modifications of parameters at the step where they first differ."""
    return edited(group, "parameters", found) if found.point == "step" else None


def parameters_earlier(group: Replicas, found: Divergence) -> Cause | None:
    """Modifications of parameters some steps before it was seen that they differ."""
    return edited_once(group, found, "parameters") if found.point == "step" else None


def edited_once(group: Replicas, found: Divergence, kind: str) -> Cause | None:
    """The ranks that differ from the others, and only they, modified parameters or optimizer state
    some steps before that was seen: not every tensor is compared at every step.

    Args:
        kind: `parameters` or `state`.
    """
    steps = window(group, found)
    last: dict[int, Edited] = {}
    for number, member in group.members.items():
        for event in edits_of(member, kind):
            if event.changed and event.step in steps:
                last[number] = event
    everybody, ranks = tuple(sorted(group.members)), tuple(sorted(last))
    blamed = tuple(sorted(found.minority))
    if blamed == everybody:
        blamed = ranks  # no majority: blame those who modified something, unless all did
    if not ranks or ranks != blamed or ranks == everybody:
        return None
    member, event = group.members[ranks[0]], last[ranks[0]]
    what, were = ("optimizer state", "was") if kind == "state" else ("parameters", "were")
    if event.site < 0:  # its line may be known from a later one
        later = (e for e in edits_of(member, kind) if e.step > event.step and e.site >= 0)
        event = replace(event, site=next((e.site for e in later), -1))
    return Cause(
        EDIT_ON_SOME,
        text=f"{modify(ranks)} {what} before step {event.step}; the other ranks do not",
        fix=SAME_EVERYWHERE,
        label=f"{what} {were} modified after step {event.step - 1}, {SOME}",
        location=_spot(member.rank, event, sorted(event.functions)),
        ranks=ranks,
        evidence={MODIFIED_ON: list(ranks), "modified_before_step": event.step},
    )


def before_the_step(group: Replicas, found: Divergence) -> Cause | None:
    """Parameters differ since a step in which some ranks, for the first time, modified gradients
    and the others did not: not all gradients are compared in every step."""
    if found.point != "step":
        return None
    moved = window(group, found)
    steps = range(max(0, moved.start - 1), moved.stop - 1)
    edits = {
        n: [e for e in edits_of(m, "gradients") if e.changed] for n, m in group.members.items()
    }
    for step in sorted({e.step for mine in edits.values() for e in mine if e.step in steps}):
        cause = edited(group, "gradients", dataclasses.replace(found, keys=[step]))
        if cause is None or cause.everybody or _all_compared(group, step, found.total):
            continue
        # Edits of one kind: their lines may not be known.
        kinds = {
            n: [(e.step, e.beside, frozenset(e.functions)) for e in mine]
            for n, mine in edits.items()
        }
        now = {how[1:] for n in cause.ranks for how in kinds[n] if how[0] == step}
        known = {how[1:] for n in cause.ranks for how in kinds[n] if how[0] < steps.start}
        rest = {how[1:] for n, mine in kinds.items() if n not in cause.ranks for how in mine}
        blamed = set(found.minority) in ({*group.members}, {*cause.ranks})
        if blamed and now and now.isdisjoint(known | rest):
            return dataclasses.replace(
                cause,
                rule=GRADIENT_EDIT,
                text=f"at step {step}, where not all gradients were compared, {cause.text}",
                evidence=cause.evidence | {"gradients_modified_at_step": step},
            )
    return None


def _all_compared(group: Replicas, step: int, count: int) -> bool:
    """Whether all gradients of a step were compared; they were equal then."""
    rows = [by_step(m, "gradients", count).get(step, ({}, 0))[0] for m in group.members.values()]
    return len(set.intersection(*(set(row) for row in rows))) == count


def _beyond_the_common(edits: dict[int, Edited], group: Replicas) -> dict[int, Edited]:
    """Without ranks that only do what all do, at the same lines or by calling the same functions
    (`unscale_`, clipping), where others do more."""
    if len(edits) < len(group.members):
        return edits
    shared = set.intersection(*(set(e.functions) for e in edits.values()))
    more = {n: e for n, e in edits.items() if shared and (e.beside or set(e.functions) - shared)}
    if 0 < len(more) < len(edits):
        return more
    lines = {n: {str(s) for s in _lines(group.members[n].rank, e)} for n, e in edits.items()}
    common = set.intersection(*lines.values())
    if own := {n: e for n, e in edits.items() if common and lines[n] - common}:
        return own
    if all(found in (common, set()) for found in lines.values()):
        others = {n: {f for m, e in edits.items() if m != n for f in e.functions} for n in edits}
        more = {n: e for n, e in edits.items() if set(e.changers) - others[n]} or more
    return more or edits


def _different_from_most(edits: dict[int, Edited]) -> tuple[int, ...]:
    """The ranks that multiply by another factor than most; all ranks where there is no majority."""
    same = equal_ranks({n: (f"{e.ratio:.4g}",) for n, e in edits.items()})
    known = edits[same[0][0]].ratio
    return (odd_ones(same) if known else ()) or tuple(sorted(edits))


def _same(edits: dict[int, Edited]) -> bool:
    """Whether all ranks seem to make the same modification: one factor, or a function of torch."""
    ratios = {f"{e.ratio:.4g}" for e in edits.values()}
    same = len(ratios) == 1 and len({e.functions for e in edits.values()}) == 1
    return same and any(e.ratio or e.functions for e in edits.values())


def _edit(group: Replicas, number: int, kind: str, first: int) -> Edited | None:
    """The last record of this rank's modifications up to a step, with the line from a later record
    where it is not known yet."""
    mine = edits_of(group.members[number], kind)
    now = next((e for e in reversed(mine) if e.step <= first), None)
    if now is None or now.site >= 0 or not (now.changed or now.undone):
        return now
    same_kind = (now.changed, now.beside, now.undone)
    later = (e for e in mine if e.step > first and (e.changed, e.beside, e.undone) == same_kind)
    known = next((e for e in later if e.site >= 0), now)
    return replace(now, site=known.site, more=known.more)


def edits_of(member: Member, kind: str) -> list[Edited]:
    """The records of a kind of tensor: `gradients`, `parameters` or `state`."""
    return member.of(Edited, kind=kind)


def _spot(rank: Rank, event: Edited, functions: list[str]) -> Location | None:
    """The line of a modification, if need be that of a call of one of these functions."""
    for site in (event.site, event.searched):
        if (found := rank.location(site)) is not None:
            return found
    if event.kind != "gradients" or event.beside:
        return None  # not, or not only, clipping
    if (known := _caller(rank, event)) is not None:
        return known
    clipped = next((c for c in rank.of(Clipped) if c.function in functions), None)
    return rank.location(clipped.site) if clipped else None


def _caller(rank: Rank, event: Edited) -> Location | None:
    spots = (rank.location(site) for site in event.changers.values())
    return next((spot for spot in spots if spot is not None), None)


def clipped(group: Replicas) -> Cause | None:
    """Some ranks clip gradients, others never do."""
    calls = {n: c for n, m in group.members.items() if (c := m.rank.first(Clipped))}
    if not calls or len(calls) == len(group.members):
        return None
    ranks = tuple(sorted(calls))
    call = calls[ranks[0]]
    return _function(group, ranks, call.function, call.site)


def _function(group: Replicas, ranks: tuple[int, ...], name: str, site: int) -> Cause:
    """These ranks call a function, and no others."""
    return Cause(
        FUNCTION_ON_SOME,
        text=f"{name} is called on {ranks_text(ranks)} only",
        fix=f"call {name} on every rank: averaged gradients are equal, and so is their norm",
        label="not called on the other ranks",
        location=group.members[ranks[0]].rank.location(site),
        ranks=ranks,
    )
