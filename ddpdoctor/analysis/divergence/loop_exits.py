"""Loops that some ranks have left while others are still in them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf

from ...events import CALLERS, CallSite, ExceptionPassed
from ...report.findings import Condition, Evidence, Finding
from ...run import Location, Rank, ranks_do, ranks_text
from ..calls.call_logs import CallRecord
from ..control_flow.branches import condition
from ..control_flow.caught_exceptions import handler
from ..control_flow.jumps import (
    OF_MODEL,
    SAME_ON_ALL,
    Key,
    catching,
    depth_in,
    exits,
    has_left,
    in_same_run,
    loops_around,
    same_function,
    uneven,
    ways_out,
    whole,
)
from ..control_flow.loop_rounds import (
    Leaver,
    is_last,
    iterations_of,
    skipped_in,
    steps_taken,
    until_call,
)
from ..control_flow.skipped_batches import SkippedBatches, skips
from .divergence import CallDivergence
from .divergence_causes import by_their_rank
from .skipped_round import skipped_round

SKIPPED_BY = "took_no_step_for_a_batch"
"""Name of the evidence which ranks skipped a round."""

VALUES_OMITTED_ON = "the_same_values_but_for_a_few_on_ranks"
"""Name of the evidence of hyperparameter-skew which ranks omit some of the values of others."""

MAY_END = "may end the loop earlier on some ranks"
"""Label of a statement that may have ended a loop."""

_NAMED = 2
"""Statements named in a sentence."""


class LoopExitKind(enum.Enum):
    """How a rank left a loop that another rank is still in.

    `DRY`: its loader had fewer batches. `FEWER`: it had fewer iterations, over whatever. `SKIPPED`:
    it did all iterations, but skipped in some what the other rank does. `BROKE`: it left the very
    iteration of the loader that the other rank is in. `RAISED`: only an exception ends the loop
    early. `OVER`: it finished the loop, the other rank is in a later one. `UNKNOWN`: no loader
    tells.
    """

    DRY = enum.auto()
    FEWER = enum.auto()
    SKIPPED = enum.auto()
    BROKE = enum.auto()
    RAISED = enum.auto()
    OVER = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class LoopExit:
    """A loop that some ranks left, or skipped a round of, while others are in it.

    Attributes:
        ranks: who left it.
        steps: `3 of its 6`, where they skipped some: for how many of their batches they took a
            step; skips: who skipped batches in all iterations.
        ways: the statements that skip the rest of a round, or catch what ends it; their `source` is
            the condition or handler that each is under.
        exits: the statements that end the loop.
        known: all of these ranks did so; otherwise some of them, nothing tells which.
        turn: the branch that shows the round, as its condition depends on the round's number only.
    """

    ranks: list[int]
    loop: Location
    how: LoopExitKind
    steps: str = ""
    ways: tuple[Location, ...] = ()
    exits: tuple[Location, ...] = ()
    known: bool = True
    turn: str = ""
    skips: SkippedBatches | None = None

    @property
    def skipped(self) -> bool:
        return self.how is LoopExitKind.SKIPPED

    @property
    def evidence(self) -> Evidence:
        return {SKIPPED_BY: sorted(self.ranks)} if self.skipped and self.known else {}

    @property
    def who(self) -> str:
        """`rank 1`, `some of ranks 0-3`."""
        return ranks_text(self.ranks) if self.known else f"some of {ranks_text(self.ranks)}"

    @property
    def place(self) -> Location:
        """The line to point at: the statement that did it, if only one can have, or the loop."""
        lines = self.ways if self.surely else () if self._or_skipped else self.exits
        return lines[0] if len(lines) == 1 else self.loop

    @property
    def _or_skipped(self) -> bool:
        """Whether those who left the loop may have skipped a round of it instead."""
        return self.how is LoopExitKind.UNKNOWN and bool(self.ways)

    @property
    def cause(self) -> str:
        """`rank 1 left the loop at train.py:8 before the others`."""
        who = self.who
        ways = _either(self.ways)
        short = f": {ways} skips the rest of a round" if ways else ""
        if self.skipped and self.steps:
            batches = f"{who} took optimizer steps for only {self.steps} batches"
            before = self.skips.before(self.ranks) if self.skips else ""
            return f"{batches} in the loop at {self.loop}{short}{before}"
        if self.skipped:
            shown = f"; `{self.turn}` depends on the number of the round" if self.turn else ""
            return f"{who} skipped rounds of the loop at {self.loop}{short}{shown}"
        if self.how is LoopExitKind.FEWER:
            return f"{who} had fewer iterations of `{self.loop.source}` ({self.loop})"
        if self.how is LoopExitKind.RAISED:
            return f"an exception ended the loop at {self.loop} on {who}; {ways} caught it"
        dry = "; its loader had fewer batches" if self.how is LoopExitKind.DRY else ""
        exits = _either(self.exits)
        ended = f": {exits} ends it" if exits else ""
        or_skipped = f", or skipped a round{short}" if self._or_skipped else ""
        return f"{who} left the loop at {self.loop} before the others{dry}{ended}{or_skipped}"

    @property
    def label(self) -> str:
        who = self.who
        if self.how is LoopExitKind.RAISED:
            return f"{who} caught an exception here"
        if self.skipped:
            if not self.known:
                return "skips the rest of a round"
            rounds = "batches in" if self.steps else "rounds of"
            return (
                f"{who} skipped {rounds} this loop"
                if self.place == self.loop
                else f"{ranks_do(self.ranks, 'skip')} the rest of a round here"
            )
        if self.how is LoopExitKind.FEWER:
            return f"{who} had fewer iterations of this loop"
        return f"{who} left {'this loop' if self.place == self.loop else 'the loop here'}"

    @property
    def surely(self) -> bool:
        """Whether those who left had to do the round that the others are in, too."""
        return self.how in (LoopExitKind.SKIPPED, LoopExitKind.RAISED)

    @property
    def blames(self) -> bool:
        """Whether those who left it are at fault."""
        return self.surely or bool(self.exits)

    @property
    def fix(self) -> str:
        """What to change."""
        if self.how is LoopExitKind.DRY:
            return (
                "give every rank the same number of batches (`DistributedSampler`, "
                "`drop_last=True`), or train inside `with Join([model]):`, which covers none of "
                "your own collectives and does not copy the optimizer's state"
            )
        if self.how is LoopExitKind.FEWER:
            return (
                "give that loop the same number of iterations on every rank: compute the smallest "
                "number of items (`all_reduce` with `ReduceOp.MIN`) and stop there on all ranks"
            )
        alone = f"let no rank skip a {'batch' if self.steps else 'round'} on its own: "
        handled = any(w.source.startswith("except") for w in self.ways)
        if self.skipped and (handled or (self.skips and self.skips.caught)):
            return (
                f"{alone}`all_reduce` an error flag on every rank after the `try`, before any "
                "other collective, and skip on all ranks or on none"
            )
        if self.skipped:
            return f"{alone}share the condition with `all_reduce`, or take the step with `loss * 0`"
        if self.how is LoopExitKind.RAISED:
            return (
                "raise the exception again, so that the rank exits with a non-zero status and the "
                "launcher ends the others"
            )
        if self.exits and not self._or_skipped:
            return (
                "decide together: `all_reduce` the decision, or what it is computed from, and "
                "leave the loop on all ranks in the same round"
            )
        return (
            "run the same rounds of the loop, with the same calls in each, on all ranks: compute "
            "its bounds from values that are equal on all of them, and `all_reduce` any condition "
            "to stop or to skip"
        )


def _either(ways: tuple[Location, ...]) -> str:
    """`` `if bad:` (train.py:22) or `except ValueError:` (train.py:30)``."""
    return " or ".join(f"`{w.source}` ({w})" for w in ways[:_NAMED])


def left_loop(divergence: CallDivergence) -> LoopExit | None:
    """The loop that ranks are in and others have left, or skipped a round of; None where that is
    not clear."""
    inside: dict[Key, list[int]] = {}
    heads: dict[Key, Location] = {}
    for rank, made in divergence.calls.items():
        for key, head, _, _ in loops_around(made.rank, made.site):
            inside.setdefault(key, []).append(rank)
            heads[key] = head
    loops: dict[tuple[int, ...], list[tuple[Location, list[CallRecord]]]] = {}
    only = divergence.call.rank.rank if by_their_rank(divergence) else None
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
        may_be = divergence.may_be_left(staying[0], key) or _began(
            divergence, rest, stay, heads[key]
        )
        if may_be and all(has_left(divergence.calls[r], staying[0], key) for r in rest):
            loops.setdefault(tuple(rest), []).append((heads[key], staying))
    found = (
        _reported_loop([until_call(divergence.calls[r]) for r in rest], all_)
        for rest, all_ in loops.items()
    )
    left = next((left for left in found if left is not None), None)
    if left is not None:
        still = next(m for r, m in divergence.calls.items() if r not in left.ranks)
        last = next((m for m in divergence.before if m.rank.rank in left.ranks), None)
        left = _with_exits(left, last.rank, last.site, still) if last else left
    if left is not None and left.blames:
        return left
    if (rounds := skipped_round(divergence)) is not None:
        skipped = LoopExit(rounds.ranks, rounds.loop, LoopExitKind.SKIPPED, ways=rounds.ways)
        return replace(skipped, known=rounds.known, turn=rounds.turn)
    usual = divergence.left_out and left and left.how is LoopExitKind.UNKNOWN
    again = usual or (left is not None and _came_again(divergence, left))
    return None if again else left  # then the others are in a later round of the loop


def _began(divergence: CallDivergence, left: list[int], stay: list[int], loop: Location) -> bool:
    """Whether the loaders show that ranks left the very iteration in which the others are."""
    until = {r: until_call(made) for r, made in divergence.calls.items()}
    hows = {_how(until[a], until[b], loop, False) for a in left for b in stay}
    return hows <= {LoopExitKind.BROKE, LoopExitKind.DRY, LoopExitKind.SKIPPED}


def _came_again(divergence: CallDivergence, left: LoopExit) -> bool:
    """Whether the others may be in a later round of an outer loop: nothing says that the loop was
    left too early, all ranks are in a loop around it, and a branch keeps some from the next call.
    """
    call = divergence.call
    if left.how is not LoopExitKind.UNKNOWN or left.blames or call.rank.rank not in left.ranks:
        return False
    keys = [
        {key for key, _, _, _ in loops_around(made.rank, made.site)}
        for made in divergence.calls.values()
    ]
    return condition(call) is not None and bool(set.intersection(*keys))


def with_leavers_at_fault(divergence: CallDivergence) -> CallDivergence:
    """A copy with those at fault who left the loop, and the call that they skipped, where it is
    known how they left; unchanged where most ranks left."""
    left = left_loop(divergence)
    if left is not None and not left.known:
        return replace(divergence, culprits=tuple(left.ranks))
    if left is None or not left.blames:
        return divergence
    if 2 * len(left.ranks) > len(divergence.calls) and not left.turn:
        return divergence
    stay = next(made for rank, made in divergence.calls.items() if rank not in left.ranks)
    place = stay if divergence.call.rank.rank in left.ranks else divergence.call
    return replace(divergence, culprits=tuple(left.ranks), call=place)


def loop_of_leaver(leaver: Rank, last: CallSite | None, waiting: CallRecord) -> LoopExit | None:
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
        or not SAME_ON_ALL.match(left.loop.source)
    ):
        return left
    if left.ways or ways_out(waiting, left.loop)[1] or depth_in(waiting, left.loop) != 0:
        return left
    caught = tuple(catching(leaver, last))
    if uneven := list(_uneven_within(left.loop, leaver, waiting)):
        inner = (head.source for _, head, _, _ in loops_around(waiting.rank, waiting.site))
        counted = len(uneven) == 1 and not any(map(OF_MODEL.match, inner))
        known = not caught and last is not None and len(last.places) < CALLERS
        return replace(left, loop=uneven[0], how=LoopExitKind.FEWER) if counted and known else left
    return replace(left, how=LoopExitKind.RAISED, ways=caught) if caught else left


def _skipped_before(leaver: Rank, waiting: CallRecord) -> LoopExit | None:
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
) -> LoopExit | None:
    """Of nested loops, innermost first, the one to report.

    The first whose loader shows how it was left; otherwise the outermost (of one function) that is
    not known to have been finished: whoever leaves that one has left the inner ones, too.
    """
    numbers = [rank.rank for rank, _ in left]
    candidate: LoopExit | None = None
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
            candidate = None
        elif how is LoopExitKind.SKIPPED:
            known = skips([*left, *map(until_call, stay)], head)
            return LoopExit(numbers, head, how, steps_taken(left[0]), ways, skips=known)
        elif how is not LoopExitKind.UNKNOWN:
            return LoopExit(numbers, head, how, ways=ways)
        elif candidate is None or (
            same_function(candidate.loop, head)
            if one_function
            else not (uneven(candidate.loop) and whole(stay[0], head))
        ):
            candidate = LoopExit(numbers, head, how, ways=ways)
            same = same and not broken and SAME_ON_ALL.match(head.source) is not None
    if candidate and candidate.ways and short and same:
        return replace(candidate, loop=short, how=LoopExitKind.SKIPPED)
    return candidate


def _with_exits(left: LoopExit, leaver: Rank, last: CallSite | None, stay: CallRecord) -> LoopExit:
    if left.how not in (LoopExitKind.BROKE, LoopExitKind.UNKNOWN):
        return left
    sure = left.how is LoopExitKind.BROKE
    even = not list(_uneven_within(left.loop, leaver, stay))
    return replace(left, exits=exits(leaver, last, stay, left.loop, sure, even))


def _uneven_within(loop: Location, leaver: Rank, stay: CallRecord) -> Iterator[Location]:
    """The loops inside of `loop` that may have had different numbers of iterations on two ranks."""
    heads = (head for _, head, _, _ in loops_around(stay.rank, stay.site))
    for head in takewhile(lambda head: head != loop, heads):
        if (
            uneven(head)
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


def _shifted_schedule(mine: Finding, other: Finding) -> bool:
    """Whether a hyperparameter schedule differs only because `mine` tells that ranks skipped steps:
    they have the options of later batches after fewer steps."""
    ranks = mine.evidence.get(SKIPPED_BY)
    sooner = other.evidence.get(VALUES_OMITTED_ON)
    return bool(ranks) and sooner == ranks


SHIFTED_SCHEDULE = Condition("of ranks that skipped steps", _shifted_schedule)
