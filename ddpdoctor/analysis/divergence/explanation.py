"""An explanation of a divergence, and the words that all of them share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import ClassVar

from ...events import Place, Statement
from ...report.findings import Evidence, Related, Steps
from ...run import Location, ranks_do, ranks_text
from ...run.phrases import listed
from ..calls.call_logs import CallRecord
from ..control_flow.branches import (
    branch,
    condition,
    head_of,
    in_forward,
    leading,
    run_by_all,
    unbranched,
    unwrapped,
)
from ..waiting.thresholds import LINES_SHOWN
from .attribution import WHO, Attribution, Explanation
from .entered_branches import around_all, entered, only_theirs, opposed
from .loop_exits import left_loop
from .suspects import Suspect

ANOTHER_ORDER = "called in a different order than on the other ranks"

SAME_ORDER = "call the collectives in the same order on every rank (sort the keys looped over)"


class CallExplanation(Explanation[Suspect]):
    """An explanation of a divergence; `check` reports it."""

    check: ClassVar[str] = "collective-mismatch"

    def blame(
        self,
        blamed: Suspect,
        *,
        cause: str,
        fix: str,
        label: str = "",
        summary: str = "",
        location: Location | None = None,
        related: tuple[Related, ...] = (),
        subjects: tuple[str, ...] = (),
        steps: Steps | None = None,
        evidence: Evidence | None = None,
        also: Collection[int] = (),
        around: bool = True,
    ) -> Attribution:
        """The attribution to the ranks of `blamed`, with its call.

        Args:
            label, summary: by default how the calls differ, and who makes which.
            also: ranks that are at fault for the same, in an earlier round.
            around: show the branch or the loop that may have made the ranks diverge.
        """
        seen, said = _difference(blamed)
        location = location or blamed.divergence.location(blamed.call)
        shown = {(r.location.file, r.location.line) for r in related}
        rest = (
            r
            for r in _related(blamed, location, around)
            if (r.location.file, r.location.line) not in shown
        )
        ops = {made.signature.op for made in blamed.divergence.calls.values()}
        return Attribution(
            rule=self.rule,
            check=self.check,
            culprits=tuple(sorted({*blamed.ranks, *also})),
            call=blamed.call,
            location=location,
            label=label or seen,
            summary=summary or f"{said}: {sides_text(blamed)}",
            cause=cause,
            fix=fix,
            related=(*related, *rest),
            subjects=subjects or tuple(sorted(ops)),
            steps=steps,
            evidence=evidence or {},
        )


def _difference(blamed: Suspect) -> tuple[str, str]:
    """A label and a sentence for how the calls differ, whatever the reason."""
    divergence, op = blamed.divergence, blamed.call.signature.op
    extra = divergence.extra or only_theirs(blamed)
    one_op = len({made.signature.op for made in divergence.calls.values()}) == 1
    others_entered = (
        blamed.call.rank.rank not in blamed.ranks and not divergence.shifted and entered(blamed)
    )
    skipped = blamed.rounds or others_entered
    label = "not what the other ranks call"
    said = "ranks call different collectives"
    if one_op:
        said = f"ranks make different calls of {op}"
    elif skipped:
        said = f"{ranks_text(blamed.ranks)} skipped {op}"
    if divergence.shifted:
        label, said = ANOTHER_ORDER, "ranks make the same calls in a different order"
    if extra:
        said = (
            f"only some ranks make this call of {op}"
            if one_op
            else f"only some ranks call {op} here"
        )
        label = "not called by every rank"
    return f"skipped by {WHO}" if skipped else label, said


def what_was_skipped(blamed: Suspect) -> str:
    divergence, op = blamed.divergence, blamed.call.signature.op
    one_op = len({made.signature.op for made in divergence.calls.values()}) == 1
    if one_op and not divergence.shifted:
        return f"ranks make different calls of {op}"
    return f"{ranks_text(blamed.ranks)} skipped {op}"


def in_another_order(blamed: Suspect) -> bool:
    """Whether all make the same calls, so that only their order is wrong."""
    divergence = blamed.divergence
    return divergence.shifted and not divergence.extra and not only_theirs(blamed)


def order_fix(blamed: Suspect) -> str:
    """What to do where only the order of the calls is known to differ."""
    if in_another_order(blamed):
        return SAME_ORDER
    if not blamed.rest:
        return "call the same collectives in the same order on every rank of the group"
    return f"call {blamed.call.signature.op} on every rank of the group, or on none"


def sides_text(blamed: Suspect) -> str:
    """`at call 3 of the default group, rank 1 calls all_reduce (train.py:88) and ...`."""
    divergence, found = blamed.divergence, []
    sides, depth = list(divergence.sides(blamed.ranks)), divergence.depth(blamed.call)
    one_line = len({(made.signature.op, made.location_at(depth)) for _, made in sides}) == 1
    for side, made in sides:
        spot = made.location_at(depth) if depth else made.where
        spots = ", ".join(filter(None, (str(spot or ""), made.key and f"`{made.key}`")))
        what = made.signature.text if one_line else made.signature.op
        found.append(f"{ranks_do(side, 'call')} {what}" + (f" ({spots})" if spots else ""))
    return f"at call {divergence.index} of {divergence.key}, {listed(found)}"


def _related(blamed: Suspect, location: Location | None, around: bool) -> tuple[Related, ...]:
    """The lines of the other ranks, and what is `around` the call; `location` is shown already."""
    lines_shown = dict[Location, str]()
    for label, spot in (*(_around(blamed, location) if around else ()), *_lines(blamed)):
        if spot is not None and spot != location:
            lines_shown.setdefault(spot, label)
    return tuple(Related(label, spot) for spot, label in list(lines_shown.items())[:LINES_SHOWN])


def _around(blamed: Suspect, location: Location | None) -> Iterator[tuple[str, Location | None]]:
    """The branch and the loop that made the ranks diverge."""
    call, left = blamed.call, left_loop(blamed)
    # Where a loop explains it, or all are at fault, only a branch on the rank is of interest.
    heads = (condition(call), None if left or not blamed.rest else branch(call))
    branched = next((h for h in heads if h is not None and not around_all(blamed, *h)), None)
    spot = call.rank.location(branched[0].site) if branched else None
    if branched is not None and spot is not None:
        head = head_of(spot, branched[1])
        if location is None or location.line != head.line:
            yield leading(branched[1], _without(blamed)), head
    if left is not None:
        yield left.label, left.place


def _without(blamed: Suspect) -> tuple[int, ...]:
    """The ranks that do not make the call; none where nothing tells them from the others."""
    calls = blamed.call.rank.rank in blamed.ranks
    ranks = blamed.divergence.calls if blamed.rest else ()
    return tuple(sorted(r for r in ranks if (r in blamed.ranks) != calls))


def _lines(blamed: Suspect) -> Iterator[tuple[str, Location | None]]:
    """The line of each side, and the one that called it."""
    divergence, call = blamed.divergence, blamed.call
    sides, depth = list(divergence.sides(blamed.ranks)), divergence.depth(call)
    by_all = len({made.caller for _, made in sides}) == 1
    for side, made in sides:
        op = made.signature.op
        if divergence.arguments_depth(call):
            here = f"the arguments of {op} on {ranks_text(side)} come from here"
        else:
            here = f"{ranks_do(side, 'call')} {op} here"
        yield here, made.location_at(depth)
        if not depth:
            by = "called from here" if by_all else f"{op} of {ranks_text(side)} is called from here"
            yield by, made.caller


def branch_fix(blamed: Suspect, place: Place, head: Statement) -> str:
    """What to do about a branch around a call."""
    call = blamed.call
    # Both sides make the call, so moving it out of one branch helps nobody.
    if in_another_order(blamed):
        return SAME_ORDER
    if opposed(blamed, place, head):
        return (
            "call the same collectives in the same order in every branch of "
            f"`{head.opening}`, or once outside of it"
        )
    op = call.signature.op
    if op.startswith("DDP"):
        return unwrapped(head, call)
    here, spot = blamed.divergence.location(call), call.rank.location(place.site)
    if spot is not None and in_forward(spot, op):
        return run_by_all(head, spot, op)
    if None not in (here, spot) and here != spot:  # the branch is in a function that calls this one
        return unbranched(head, f"make the call at {spot}, which leads to {op},")
    if here is None or op in here.source:
        return unbranched(head, f"call {op}")
    name = _used(call, here)
    return unbranched(head, f"use `{name}`, which calls {op}," if name else "make this call")


def _used(call: CallRecord, here: Location) -> str:
    """The function of a library that makes a call, where the line names it."""
    name = call.site.through if call.site is not None else ""
    return name if name and re.search(rf"\b{re.escape(name)}\b", here.source) else ""


def through(call: CallRecord) -> str:
    """What makes a call that the program's line does not make itself, where a library does: `a
    function of a library that train.py:8 calls`; empty where the line makes it."""
    here = call.location
    if here is None or call.site is None or not call.site.through:
        return ""
    name = _used(call, here)
    return f"`{name}`, of a library," if name else f"a function of a library that {here} calls"
