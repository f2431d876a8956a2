"""What set copies apart, as far as it was seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from ddpdoctor.events import Clipped, Edited, ProbeTrouble, StepDone
from ddpdoctor.findings import Finding, Location, Related, Steps
from ddpdoctor.run import (
    Rank,
    Run,
    equal_ranks,
    fold_ranks,
    groups_text,
    odd_ones,
    ranks_do,
    ranks_text,
)

from . import _parting
from ._distances import distances
from ._replicas import Divergence, Member, Replicas, by_module


@dataclass(frozen=True)
class Cause:
    """Why copies differ: the line, who did it, and what to change.

    Attributes:
        everybody: all ranks do something of the kind, `ranks` in another way.
        trained: the steps that were surely taken since, where copies were compared only after them.
    """

    text: str
    fix: str
    label: str
    location: Location | None = None
    ranks: tuple[int, ...] = ()
    known: bool = True
    related: tuple[Related, ...] = ()
    evidence: dict[str, object] = field(default_factory=dict)
    everybody: bool = False
    trained: Steps | None = None


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
    fix = "do it on every rank with the same numbers, or not at all"
    if kind == "parameters" and _goes_on(member, kind, event.step):
        moment = f"in every step from step {event.step} on"
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
        everybody=len(changing) == len(group.members),
    )


def _since(group: Replicas, found: Divergence, changing: dict[int, Edited]) -> bool:
    """Whether any of these, if not all ranks make them, came after the copies were equal."""
    if len(changing) == len(group.members):
        return True
    steps = _parting.parted(group, found)
    return any(e.step in steps for e in changing.values())


_MOMENT = {
    "gradients": ("between the backward and the step", "the backward"),
    "parameters": ("between two steps", "the step before"),
    "first parameters": ("between the wrap and the first step", "the wrap"),
}


def _goes_on(member: Member, kind: str, step: int) -> bool:
    """Whether it is edited before every step after this one, too."""
    later = {e.step: e.changed for e in edits_of(member, kind) if e.step > step}
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
    steps = _parting.parted(group, found)
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


def _beyond_the_usual(edits: dict[int, Edited], group: Replicas) -> dict[int, Edited]:
    """Without ranks that only do what all do, at the same lines or by calling the same functions
    (`unscale_`, clipping), where others do more."""
    if len(edits) < len(group.members):
        return edits
    usual = set.intersection(*(set(e.functions) for e in edits.values()))
    more = {n: e for n, e in edits.items() if usual and (e.beside or set(e.functions) - usual)}
    if not more and len({e.functions for e in edits.values()}) == 1:
        lines = {n: {str(s) for s in _lines(group.members[n].rank, e)} for n, e in edits.items()}
        common = set.intersection(*lines.values())
        more = {n: e for n, e in edits.items() if common and lines[n] - common}
    return more or edits


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
    clipped = next((c for c in rank.of(Clipped) if c.function in functions), None)
    return rank.location(clipped.site) if clipped else None


def clipped(group: Replicas) -> Cause | None:
    """Some ranks clip, others never do."""
    calls = {n: c for n, m in group.members.items() if (c := m.rank.first(Clipped))}
    if not calls or len(calls) == len(group.members):
        return None
    ranks = tuple(sorted(calls))
    call = calls[ranks[0]]
    return Cause(
        text=f"{call.function} is called on {ranks_text(ranks)} only",
        fix=f"call {call.function} on every rank: gradients are equal there, so is the norm",
        label="not called on the other ranks",
        location=group.members[ranks[0]].rank.location(call.site),
        ranks=ranks,
    )


EXPLAINING = (
    "hyper-parameters and loss scales",
    "edits of gradients and parameters by hand",
    "loads of weights and optimizer states",
)
"""What sets copies apart, as the probe names it where it could not watch it."""


def unknown(group: Replicas, found: Divergence, moment: str) -> Cause:
    """Nothing that was seen explains it."""
    members = group.members.values()
    nodes = {m.rank.node for m in members}
    blind = {t.lost for m in members for t in m.rank.of(ProbeTrouble)}.intersection(EXPLAINING)
    suspects = "; suspects are code that runs on some ranks only, memory or a processor that "
    suspects += "computes wrong, or kernels that are not deterministic"
    if len(nodes) > 1:
        suspects += f" (the ranks are on {len(nodes)} nodes)"
    text = f"nothing that was seen explains it: {moment}"
    fix = "look for code under `if rank == ...` that touches the model; if there is none, run the "
    fix += "same step twice on the ranks that differ and compare"
    if unseen := found.unseen:
        text += f", but of the steps {unseen[0]} to {found.first} only the last was looked at"
    if unseen or found.kind == "gradients":
        fix = "run it again with `--every 1`: then all of them are looked at in every step, and on "
        fix += "the CPU an edit by hand is told with its rank, and with its line where it is made "
        fix += "more than once; look for code under `if rank == ...`"
    if blind:
        suspects = f"; but {' and '.join(sorted(blind))} were not observed: the doctor itself "
        suspects += "failed there, and it may well be those"
        fix = "print on every rank what was not observed, and compare; look for code under "
        fix += "`if rank == ...` that touches the model or its optimizer"
    return Cause(text=text + suspects, fix=fix, label="applied here", known=False)


def written(group: Replicas, found: Divergence) -> Cause:
    """No optimizer holds them, and yet they change."""
    return Cause(
        text="no optimizer holds these parameters, the program writes them itself after each "
        "backward (from copies that an optimizer holds, say), and not the same values on every "
        "rank: DDP averages gradients, and made parameters equal only when it was made",
        fix="make such copies (`p.detach().clone()`) after `DistributedDataParallel(...)`, which "
        "gives all ranks the parameters of rank 0, or send them once: `dist.broadcast(copy, 0)`",
        label="equal only from here to the first update",
        location=wrap_line(group),
        ranks=found.minority,
    )


def step_line(group: Replicas, ranks: tuple[int, ...]) -> Location | None:
    """The line of the optimizer's step."""
    for number in (*ranks, *group.members):
        member = group.members.get(number)
        if member is None:
            continue
        for done in member.rank.of(StepDone):
            if done.optimizer == member.optimizer:
                return member.rank.location(done.site)
    return None


def step_time(member: Member, step: int) -> float:
    """When a rank took a step, on its own clock."""
    done = [e for e in member.rank.of(StepDone) if e.optimizer == member.optimizer]
    return next((e.at for e in done if e.step >= step), done[-1].at if done else 0.0)


def wrap_line(group: Replicas) -> Location | None:
    return group.any.rank.location(group.any.wrapped.site)


def told(group: Replicas, found: Divergence, cause: Cause) -> dict[str, object]:
    """What every finding about copies that differ has in common."""
    wrapped = wrap_line(group)
    if wrapped == cause.location:
        wrapped = None
    return {
        "ranks": cause.ranks or found.minority,
        "steps": _steps(group, found),
        "subjects": tuple(found.names),
        "location": cause.location or step_line(group, found.minority),
        "label": cause.label,
        "related": cause.related + ((Related(group.any.wrapped.here, wrapped),) if wrapped else ()),
        "cause": cause.text,
        "fix": cause.fix,
        "at": found.at,
    }


def evidence(group: Replicas, found: Divergence) -> dict[str, object]:
    """The figures: how many, how far, growing or not."""
    sizes = distances(group, found)
    shown = {step: _size(value) for step, value in sizes.items()}
    facts: dict[str, object] = {
        "differing": f"{len(found.names)} of {_tensors(found)}",
        "looks_that_differ": f"{len(found.keys)} of {found.compared} compared since",
        "groups_of_equal_ranks": groups_text(found.split),
        "modules": by_module(found.names),
    }
    if found.before >= 0:
        facts["last_equal_at_step"] = found.before
    if shown:
        facts["relative_distance_by_step"] = shown
        facts["grows"] = _grows(list(sizes.values()))
    return facts


def _tensors(found: Divergence) -> str:
    if found.looked == found.total:
        return f"{found.total} tensors"
    return f"{found.looked} tensors compared, of {found.total}"


def _steps(group: Replicas, found: Divergence) -> Steps | None:
    steps = Steps.of(found.keys)
    if steps is None or found.point != "step":
        return steps
    every = max(m.last_step for m in group.members.values()) - steps.first + 1
    whole = found.compared >= every
    return steps if whole else Steps(steps.first, steps.last, steps.count, found.compared)


def may_follow(effect: Finding, cause: Finding, later: int) -> bool:
    """Whether the steps allow it, where an effect shows `later` steps after its cause. What was
    first seen at a step may have begun just after the last one at which there was nothing."""
    if cause.steps is None or effect.steps is None:
        return True
    equal = cause.evidence.get("last_equal_at_step", -1)
    return effect.steps.first >= (equal if isinstance(equal, int) else -1) + 1 + later


def _size(value: float) -> str:
    return f"{value:.2g}" if value > 1e-6 else "below 1e-6"


def _grows(sizes: list[float]) -> str:
    if len(sizes) < 2:
        return "measured once"
    if sizes[-1] > 1.5 * sizes[0]:
        return "yes"
    return "shrinks" if sizes[-1] < sizes[0] / 1.5 else "no"


def largest(group: Replicas, found: Divergence) -> str:
    """` by 3 % of their norm`, where that was measured."""
    sizes = distances(group, found)
    if not sizes:
        return ""
    percent = 100 * max(sizes.values())
    if percent <= 1e-4:
        return " by rounding-size amounts"
    told = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by {told} % of their norm"


def some(names: list[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def differ(count: int, split: list[tuple[int, ...]], run: Run) -> str:
    """That so many things differ, and between whom."""
    return f"{'differs' if count == 1 else 'differ'} {between(split, run)}"


def between(split: list[tuple[int, ...]], run: Run) -> str:
    """Who differs from whom."""
    if len(split) == 2:
        return f"between ranks {fold_ranks(split[0])} and {fold_ranks(split[1])}"
    ranks = [r for g in split for r in g]
    who = "all ranks" if len(ranks) == run.world_size else ranks_text(ranks)
    return f"between {who}, in {len(split)} versions"
