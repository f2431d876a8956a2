"""Loops that some ranks have left while others are still in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from math import inf

from ...events import CALLERS, CallSite, ExceptionPassed, LoaderSeen, Wrapped
from ...report.findings import Condition, Finding
from ...run import Location, Rank
from ..calls.call_logs import CallRecord
from ..control_flow.branches import condition
from ..control_flow.caught_exceptions import handler
from ..control_flow.jumps import (
    OF_MODEL,
    Key,
    catching,
    depth_in,
    exits,
    has_left,
    in_same_run,
    left_at_once,
    loops_around,
    same_function,
    same_rounds,
    uneven,
    ways_out,
    whole,
)
from ..control_flow.loop_rounds import (
    Leaver,
    is_last,
    iterations_of,
    keeps_no_state,
    skipped_in,
    steps_taken,
    until_call,
)
from ..control_flow.skipped_batches import skips
from .align import CallDivergence
from .entered_branches import by_their_rank
from .left_loop import SKIPPED_BY, LeftLoop, LoopExitKind, ShortLoader
from .skipped_round import skipped_round
from .suspects import Suspect

VALUES_OMITTED_ON = "the_same_values_but_for_a_few_on_ranks"
"""Name of the evidence of hyperparameter-skew which ranks omit some of the values of others."""

MAY_END = "may end the loop earlier on some ranks"
"""Label of a statement that may have ended a loop."""


def left_loop(suspect: Suspect) -> LeftLoop | None:
    """The loop that ranks are in and others have left, or skipped a round of; None where that is
    not clear."""
    divergence = suspect.divergence
    if len({bool(m.site and m.site.thread) for m in divergence.calls.values()}) > 1:
        return None  # the loops around a call in a thread say nothing of the main thread's
    inside: dict[Key, list[int]] = {}
    heads: dict[Key, Location] = {}
    for rank, made in divergence.calls.items():
        for key, head, _, _ in loops_around(made.rank, made.site):
            inside.setdefault(key, []).append(rank)
            heads[key] = head
    loops: dict[tuple[int, ...], list[tuple[Location, list[CallRecord]]]] = {}
    only = suspect.call.rank.rank if by_their_rank(suspect) else None
    for key, stay in inside.items():
        if only in stay:
            continue  # nobody else ever made that call in it
        rest, staying = (
            [r for r in divergence.calls if r not in stay],
            [divergence.calls[r] for r in stay],
        )
        in_another = any(not set(others) & set(stay) for others in inside.values())
        if not rest or (in_another and whole(staying[0], heads[key])):
            continue  # ranks in the other loop have this one before them, or have finished it
        may_be = (
            divergence.may_be_left(staying[0], key)
            or _began(divergence, rest, stay, heads[key])
            or all(left_at_once(divergence.calls[r], staying[0], key) for r in rest)
        )
        gone = (
            has_left(divergence.calls[r], staying[0], key)
            or _dry(divergence.calls[r], staying[0], heads[key])
            for r in rest
        )
        if may_be and all(gone):
            loops.setdefault(tuple(rest), []).append((heads[key], staying))
    found = (
        _reported_loop([until_call(divergence.calls[r]) for r in rest], all_)
        for rest, all_ in loops.items()
    )
    left = next((left for left in found if left is not None), None)
    last = still = None
    if left is not None:
        still = next(m for r, m in divergence.calls.items() if r not in left.ranks)
        last = next((m for m in divergence.before if m.rank.rank in left.ranks), None)
        left = _with_exits(left, last.rank, last.site, still) if last else left
    if left is not None and left.blames:
        return left
    if (rounds := skipped_round(divergence)) is not None:
        return rounds
    usual = suspect.rounds and left and left.how is LoopExitKind.UNKNOWN
    if left is None or usual or _came_again(suspect, left):
        return None  # then the others are in a later round of the loop
    return _ended_by_itself(left, last.rank, last.site, still) if last and still else left


def _ended_by_itself(
    left: LeftLoop, leaver: Rank, last: CallSite | None, stay: CallRecord
) -> LeftLoop:
    """The loop, with how it ended where none of its statements ends it: by an exception that was
    caught around it in the middle of its loader's epoch, or else because its items were used up."""
    settled = left.how not in (LoopExitKind.BROKE, LoopExitKind.UNKNOWN)
    if settled or left.ways or left.exits or ways_out(stay, left.loop)[1]:
        return left
    caught = tuple(catching(leaver, last))
    if left.how is LoopExitKind.BROKE:
        return replace(left, how=LoopExitKind.RAISED, ways=caught) if caught else left
    # An exception may have ended it, and a handler may be in a caller that is not on record.
    raised = leaver.exception is not None or leaver.first(ExceptionPassed) is not None
    known = not (caught or raised) and last is not None and len(last.places) < CALLERS
    items = left.loop.source.startswith(("for ", "async for "))
    own = items and not same_rounds(left.loop, leaver, stay.rank)
    return replace(left, how=LoopExitKind.FEWER) if known and own else left


def _dry(made: CallRecord, still: CallRecord, loop: Location) -> bool:
    """Whether the loader of a loop has given a rank all that it has for it, if anything at all."""
    return _how(until_call(made), until_call(still), loop, False) is LoopExitKind.DRY


def _began(divergence: CallDivergence, left: list[int], stay: list[int], loop: Location) -> bool:
    """Whether the loaders show that ranks left the very iteration in which the others are."""
    until = {r: until_call(made) for r, made in divergence.calls.items()}
    hows = {_how(until[a], until[b], loop, False) for a in left for b in stay}
    return hows <= {LoopExitKind.BROKE, LoopExitKind.DRY, LoopExitKind.SKIPPED}


def _came_again(suspect: Suspect, left: LeftLoop) -> bool:
    """Whether the others may be in a later round of an outer loop: nothing says that the loop was
    left too early, all ranks are in a loop around it, and a branch keeps some from the next call.
    """
    call = suspect.call
    if left.how is not LoopExitKind.UNKNOWN or left.blames or call.rank.rank not in left.ranks:
        return False
    keys = [
        {key for key, _, _, _ in loops_around(made.rank, made.site)}
        for made in suspect.divergence.calls.values()
    ]
    return condition(call) is not None and bool(set.intersection(*keys))


def loop_of_leaver(leaver: Rank, last: CallSite | None, waiting: CallRecord) -> LeftLoop | None:
    """The loop that a rank left for good while another rank is in a call inside of it.

    Args:
        last: the last call of the leaver.
        waiting: the call of the rank that waits for it.
    """
    loops = [
        (head, [waiting])
        for key, head, _, _ in loops_around(leaver, last)
        if in_same_run(leaver, last, waiting, key)
    ]
    left = _reported_loop([(leaver, inf)], loops, one_function=True)
    if left is not None:
        left = _with_exits(left, leaver, last, waiting)
    if left is not None and left.how is LoopExitKind.UNKNOWN:
        left = _skipped_before(leaver, waiting) or left
    if (
        left is None
        or left.how is not LoopExitKind.UNKNOWN
        or not same_rounds(left.loop, leaver, waiting.rank)
    ):
        broke = left is not None and left.how is LoopExitKind.BROKE
        return _ended_by_itself(left, leaver, last, waiting) if left and broke else left
    if left.ways or ways_out(waiting, left.loop)[1] or depth_in(waiting, left.loop) != 0:
        return left
    caught = tuple(catching(leaver, last))
    if uneven := list(_uneven_within(left.loop, leaver, waiting)):
        inner = (head.source for _, head, _, _ in loops_around(waiting.rank, waiting.site))
        counted = len(uneven) == 1 and not any(map(OF_MODEL.match, inner))
        known = not caught and last is not None and len(last.places) < CALLERS
        return replace(left, loop=uneven[0], how=LoopExitKind.FEWER) if counted and known else left
    return replace(left, how=LoopExitKind.RAISED, ways=caught) if caught else left


def _skipped_before(leaver: Rank, waiting: CallRecord) -> LeftLoop | None:
    """The loop around a call whose loader shows that a rank finished it with fewer optimizer
    steps, whatever that rank did last."""
    for _, head, _, _ in loops_around(waiting.rank, waiting.site):
        if _how((leaver, inf), until_call(waiting), head, False) is LoopExitKind.SKIPPED:
            return _reported_loop([(leaver, inf)], [(head, [waiting])])
    return None


def uneven_since(leaver: Rank, waiting: Rank, loop: Location) -> int | None:
    """The optimizer step from which two ranks are in different epochs of a loop over a loader,
    because one took fewer batches in an epoch before; None where they are not."""
    mine, theirs = iterations_of((leaver, inf), loop), iterations_of((waiting, inf), loop)
    for a, b, after in zip(mine, theirs, mine[1:], strict=False):
        same = (a.loader, a.began.epoch) == (b.loader, b.began.epoch)
        if same and a.ended and b.ended and a.ended.batches != b.ended.batches:
            return after.began.step
    return None


def _reported_loop(
    left: list[Leaver], loops: list[tuple[Location, list[CallRecord]]], one_function: bool = False
) -> LeftLoop | None:
    """Of nested loops, innermost first, the one to report.

    The first whose loader shows how it was left; otherwise the outermost (of one function) that is
    not known to have been finished: whoever leaves that one has left the inner ones, too.
    """
    numbers = [rank.rank for rank, _ in left]
    ranks = [*(rank for rank, _ in left), *(made.rank for _, stay in loops for made in stay)]
    candidate: LeftLoop | None = None
    ways: tuple[Location, ...] = ()
    short: Location | None = None
    same = True
    for n, (head, stay) in enumerate(loops):
        hidden = n == 0 and _no_loader(stay[0])
        how = _agreed(_how(r, until_call(s), head, hidden) for r in left for s in stay)
        here, broken = ways_out(stay[0], head)
        if seen := _handled(left, here):
            ways, short = seen, head
        elif here and not ways and depth_in(stay[0], head) is not None:
            ways, short = here, head
        if how is LoopExitKind.OVER:
            done = all(_finished(r, until_call(s), head) for r in left for s in stay)
            if candidate and done and not candidate.ways and uneven(candidate.loop, *ranks):
                return replace(candidate, how=LoopExitKind.FEWER)
            candidate = None
        elif how is LoopExitKind.SKIPPED:
            known = skips([*left, *map(until_call, stay)], head)
            return LeftLoop(numbers, head, how, steps_taken(left[0]), ways, skips=known)
        elif how is LoopExitKind.DRY:
            loader = _short_loader(left[0], None if hidden else head)
            return LeftLoop(numbers, head, how, ways=ways, short=loader)
        elif how is not LoopExitKind.UNKNOWN:
            return LeftLoop(numbers, head, how, ways=ways)
        elif candidate is None or (
            same_function(candidate.loop, head)
            if one_function
            else not (uneven(candidate.loop, *ranks) and whole(stay[0], head))
        ):
            candidate = LeftLoop(numbers, head, how, ways=ways)
            same = same and not broken and same_rounds(head, *ranks)
    if candidate and candidate.ways and short and same:
        return replace(candidate, loop=short, how=LoopExitKind.SKIPPED)
    return candidate


def _short_loader(left: Leaver, loop: Location | None) -> ShortLoader | None:
    """The loader whose batches ended a loop on a rank."""
    rank, _ = left
    last = next((i for i in reversed(iterations_of(left, loop)) if i.ended), None)
    if last is None or last.ended is None:
        return None
    made = [e for e in rank.of(LoaderSeen) if e.loader == last.began.loader]
    wrapped = any(w.wrapper == "DistributedDataParallel" and not w.by for w in rank.of(Wrapped))
    joins = last.ended.backwards > 0 and wrapped and keeps_no_state(rank)
    return ShortLoader(last.ended.batches, any(e.iterable for e in made), joins)


def _with_exits(left: LeftLoop, leaver: Rank, last: CallSite | None, stay: CallRecord) -> LeftLoop:
    if left.how not in (LoopExitKind.BROKE, LoopExitKind.UNKNOWN):
        return left
    sure = left.how is LoopExitKind.BROKE
    even = not list(_uneven_within(left.loop, leaver, stay))
    found = exits(leaver, last, stay, left.loop, sure, even)
    loops = {end.loop for end in found}
    loop = loops.pop() if len(loops) == 1 else left.loop
    guarded = bool(found) and all(end.guard for end in found)
    return replace(
        left,
        loop=loop,
        exits=tuple(end.decides for end in found),
        jump=found[0].jump if len(found) == 1 else None,
        guard=found[0].guard if guarded else None,
    )


def _uneven_within(loop: Location, leaver: Rank, stay: CallRecord) -> Iterator[Location]:
    """The loops inside of `loop` that may have had different numbers of iterations on two ranks."""
    heads = (head for _, head, _, _ in loops_around(stay.rank, stay.site))
    for head in takewhile(lambda head: head != loop, heads):
        if (
            uneven(head, leaver, stay.rank)
            and _how((leaver, inf), until_call(stay), head, False) is LoopExitKind.UNKNOWN
        ):
            yield head


def _handled(left: list[Leaver], ways: tuple[Location, ...]) -> tuple[Location, ...]:
    """The handlers among `ways` that were seen to catch an exception on a rank that left."""
    seen = [
        handler(rank, event, ways)
        for rank, until in left
        for event in rank.of(ExceptionPassed)
        if event.at <= until
    ]
    return tuple(dict.fromkeys(way for way in seen if way is not None))


def _no_loader(made: CallRecord) -> bool:
    """Whether none of the loops around a call iterates a DataLoader itself."""
    return not any(
        iterations_of((made.rank, inf), head)
        for _, head, _, _ in loops_around(made.rank, made.site)
    )


def _agreed(hows: Iterable[LoopExitKind]) -> LoopExitKind:
    known = set(hows)
    if LoopExitKind.OVER in known:
        return LoopExitKind.OVER
    return known.pop() if len(known) == 1 else LoopExitKind.UNKNOWN


def _how(left: Leaver, stay: Leaver, loop: Location, hidden: bool) -> LoopExitKind:
    """How one rank left a loop that the other is in.

    Args:
        hidden: the loader may be iterated by a generator that the loop runs over.
    """
    theirs = iterations_of(stay, None if hidden else loop)
    mine = iterations_of(left, None if hidden else loop)
    if not theirs:
        return LoopExitKind.UNKNOWN
    now = theirs[-1]
    same = next(
        (i for i in mine if (i.loader, i.began.epoch) == (now.loader, now.began.epoch)), None
    )
    if now.exhausted:  # the one it is in is not on record
        how = LoopExitKind.OVER if mine and mine[-1].exhausted else LoopExitKind.UNKNOWN
    elif same is None:
        how = LoopExitKind.OVER
    elif same.ended is None or not same.exhausted:
        how = LoopExitKind.BROKE
    elif now.began.batches < 0 or same.ended.batches < now.began.batches:
        how = LoopExitKind.DRY
    else:
        how = (
            LoopExitKind.SKIPPED
            if skipped_in(left, mine) > skipped_in(stay, theirs)
            else LoopExitKind.OVER
        )
    if hidden and (
        how not in (LoopExitKind.DRY, LoopExitKind.SKIPPED) or not same or not is_last(same, mine)
    ):
        return LoopExitKind.UNKNOWN
    return how


def _finished(left: Leaver, stay: Leaver, loop: Location) -> bool:
    """Whether one rank finished the loop over a loader in the epoch that the other is still in,
    which has as many batches for both: then loops inside had fewer rounds on the first."""
    mine, theirs = iterations_of(left, loop), iterations_of(stay, loop)
    if not theirs or theirs[-1].exhausted:
        return False
    now = theirs[-1].loader, theirs[-1].began.epoch
    batches = theirs[-1].began.batches
    same = next((i for i in mine if (i.loader, i.began.epoch) == now), None)
    ended = same.ended if same is not None and same.exhausted else None
    return ended is not None and ended.batches == batches > 0


def _shifted_schedule(mine: Finding, other: Finding) -> bool:
    """Whether a hyperparameter schedule differs only because `mine` tells that ranks skipped steps:
    they have the options of later batches after fewer steps."""
    ranks = mine.evidence.get(SKIPPED_BY)
    sooner = other.evidence.get(VALUES_OMITTED_ON)
    return bool(ranks) and sooner == ranks


SHIFTED_SCHEDULE = Condition("of ranks that skipped steps", _shifted_schedule)
