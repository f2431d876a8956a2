"""Loops that some ranks have left while others are still in them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddpdoctor.events import (
    CALLERS,
    CallSite,
    EpochBegan,
    EpochEnded,
    IndicesRead,
    LoaderSeen,
    Place,
)
from ddpdoctor.findings import Location
from ddpdoctor.run import Rank, ranks_text

from ._log import Made
from ._mismatch import Parting

Key = tuple[str, int, str]
"""File, line and function of a loop's head."""


class How(enum.Enum):
    """How a rank got out of a loop that another one is still in.

    `DRY`: its loader had fewer batches. `SKIPPED`: it read all of them, and took fewer steps.
    `BROKE`: it left the very iteration that the other is in. `OVER`: in good order, the other is in
    a later one. `UNKNOWN`: no loader tells.
    """

    DRY = enum.auto()
    SKIPPED = enum.auto()
    BROKE = enum.auto()
    OVER = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class Left:
    """A loop that some have left.

    Attributes:
        ranks: who left it.
        steps: where they skipped some, for how many of their batches they took a step.
    """

    ranks: list[int]
    loop: Location
    how: How
    steps: str = ""

    @property
    def cause(self) -> str:
        """`rank 1 left the loop at train.py:8 before the others`."""
        who = ranks_text(self.ranks)
        if self.how is How.SKIPPED:
            return f"{who} took a step for only {self.steps} batches in the loop at {self.loop}"
        dry = "; its loader had fewer batches there" if self.how is How.DRY else ""
        return f"{who} left the loop at {self.loop} before the others{dry}"

    @property
    def label(self) -> str:
        who = ranks_text(self.ranks)
        if self.how is How.SKIPPED:
            return f"{who} skipped batches in this loop"
        return f"{who} left this loop"

    @property
    def fix(self) -> str:
        """What to change."""
        if self.how is How.DRY:
            return (
                "give every rank the same number of batches (`DistributedSampler`, "
                "`drop_last=True`), or train inside `with Join([model]):`"
            )
        if self.how is How.SKIPPED:
            return (
                "let no rank skip a batch alone: share the condition with `all_reduce`, or take "
                "the step with `loss * 0`"
            )
        return (
            "let all ranks do the same rounds of the loop: compute its bounds from values that are "
            "equal on all of them, and share a decision to stop (`all_reduce` the condition)"
        )


def left_loop(parting: Parting) -> Left | None:
    """The loop that ranks are still in and others have left, None where that is not clear."""
    inside: dict[Key, list[int]] = {}
    heads: dict[Key, Location] = {}
    for rank, made in parting.made.items():
        for key, head, _ in _around(made.rank, made.site):
            inside.setdefault(key, []).append(rank)
            heads[key] = head
    loops: dict[tuple[int, ...], list[tuple[Location, list[Made]]]] = {}
    for key, stay in inside.items():
        rest = [r for r in parting.made if r not in stay]
        staying = [parting.made[r] for r in stay]
        if rest and all(_has_left(parting.made[r], staying[0], key) for r in rest):
            loops.setdefault(tuple(rest), []).append((heads[key], staying))
    found = (_told([parting.made[r].rank for r in rest], all_) for rest, all_ in loops.items())
    return next((left for left in found if left is not None), None)


def loop_of_leaver(leaver: Rank, last: CallSite | None, waiting: Made) -> Left | None:
    """The loop that a rank left for good while another still is in a call inside of it."""
    theirs = {key for key, _, _ in _around(waiting.rank, waiting.site)}
    loops = [(head, [waiting]) for key, head, _ in _around(leaver, last) if key in theirs]
    return _told([leaver], loops, one_function=True)


def apart_since(leaver: Rank, waiting: Rank, loop: Location) -> int | None:
    """The step from which two ranks are in different rounds around a loop over a loader, since one
    of them took fewer batches in an iteration before; None where they are not."""
    mine, theirs = _iterations(leaver, loop), _iterations(waiting, loop)
    for a, b, after in zip(mine, theirs, mine[1:], strict=False):
        same = (a.loader, a.began.epoch) == (b.loader, b.began.epoch)
        if same and a.ended and b.ended and a.ended.batches != b.ended.batches:
            return after.began.step
    return None


def _told(
    left: list[Rank], loops: list[tuple[Location, list[Made]]], one_function: bool = False
) -> Left | None:
    """Of nested loops, innermost first, the one to tell of.

    The first whose loader tells how it was left; otherwise the outermost (of one function) of which
    that is not known to have been in good order: whoever leaves that is out of the others, too.
    """
    numbers = [r.rank for r in left]
    candidate: Left | None = None
    for n, (head, stay) in enumerate(loops):
        hidden = n == 0 and _no_loader(stay[0])
        how = _agreed(_how(r, s.rank, head, hidden) for r in left for s in stay)
        if how is How.OVER:
            candidate = None
        elif how is not How.UNKNOWN:
            return Left(numbers, head, how, _steps(left[0]) if how is How.SKIPPED else "")
        elif not (one_function and candidate and _apart(candidate.loop, head)):
            candidate = Left(numbers, head, how)
    return candidate


def _no_loader(made: Made) -> bool:
    """Whether none of the loops around a call iterates a loader by itself."""
    return not any(_iterations(made.rank, head) for _, head, _ in _around(made.rank, made.site))


def _apart(a: Location, b: Location) -> bool:
    return (a.file, a.function) != (b.file, b.function)


def _agreed(hows: Iterable[How]) -> How:
    known = set(hows)
    if How.OVER in known:
        return How.OVER
    return known.pop() if len(known) == 1 else How.UNKNOWN


def _around(rank: Rank, site: CallSite | None) -> Iterator[tuple[Key, Location, int]]:
    """The loops around a call, innermost first, with the number of their place in it."""
    for depth, place in enumerate(site.places if site else ()):
        spot = rank.location(place.site)
        for around in place.inside if spot else ():
            if spot and around.text.startswith(("for ", "while ")):
                head = Location(spot.file, around.line, spot.function, around.text)
                yield (spot.file, around.line, spot.function), head, depth


def _has_left(made: Made, still: Made, loop: Key) -> bool:
    """Whether a rank made calls in a loop before, and is known to be outside of it now."""
    depth = next(d for key, _, d in _around(still.rank, still.site) if key == loop)
    ours, theirs = _places(made), _places(still)
    here = [n for n, p in enumerate(ours) if _function(made, p) == (loop[0], loop[2])]
    if not here and len(ours) >= CALLERS:
        return False  # it may be in the loop by a caller that is not on record
    for n in here:
        callers = zip(ours[n + 1 :], theirs[depth + 1 :], strict=False)
        if any(made.rank.location(p.site) != still.rank.location(q.site) for p, q in callers):
            return False  # another call of the function: of the loop in this one it says nothing
    return any(
        key == loop for site in made.rank.of(CallSite) for key, _, _ in _around(made.rank, site)
    )


def _places(made: Made) -> tuple[Place, ...]:
    return made.site.places if made.site else ()


def _function(made: Made, place: Place) -> tuple[str, str] | None:
    spot = made.rank.location(place.site)
    return (spot.file, spot.function) if spot else None


@dataclass(frozen=True)
class _Iteration:
    """One iteration over a loader; `loader` is the same on all ranks."""

    loader: tuple[str, int]
    began: EpochBegan
    ended: EpochEnded | None

    @property
    def exhausted(self) -> bool:
        return self.ended is not None and self.ended.exhausted


def _how(left: Rank, stay: Rank, loop: Location, hidden: bool) -> How:
    """How one rank left a loop that the other is in.

    `hidden`: the loader may be iterated by a generator that the loop runs over.
    """
    theirs = _iterations(stay, None if hidden else loop)
    mine = _iterations(left, None if hidden else loop)
    if not theirs:
        return How.UNKNOWN
    now = theirs[-1]
    same = next(
        (i for i in mine if (i.loader, i.began.epoch) == (now.loader, now.began.epoch)), None
    )
    if now.exhausted:  # the one it is in is not on record
        how = How.OVER if mine and mine[-1].exhausted else How.UNKNOWN
    elif same is None:
        how = How.OVER
    elif same.ended is None or not same.exhausted:
        how = How.BROKE
    elif now.began.batches < 0 or same.ended.batches < now.began.batches:
        how = How.DRY
    else:
        how = How.SKIPPED if _skipped(left, same) > _skipped(stay, now) else How.OVER
    if hidden and (how not in (How.DRY, How.SKIPPED) or same is not mine[-1]):
        return How.UNKNOWN
    return how


def _iterations(rank: Rank, loop: Location | None) -> list[_Iteration]:
    """The iterations over the loaders of a loop, or over all."""
    made = {e.loader: (str(rank.location(e.site)), e.made) for e in rank.of(LoaderSeen)}
    ends = {(e.loader, e.epoch): e for e in rank.of(EpochEnded)}
    found = []
    for event in rank.of(EpochBegan):
        spot = rank.location(event.site)
        if loop is None or (spot and (spot.file, spot.line) == (loop.file, loop.line)):
            key = made.get(event.loader, ("", event.loader))
            found.append(_Iteration(key, event, ends.get((event.loader, event.epoch))))
    return found


def _skipped(rank: Rank, iteration: _Iteration) -> int:
    """Batches of an iteration that no step followed, as far as that is on record."""
    number = iteration.began.loader, iteration.began.epoch
    told = iteration.ended or next(
        (e for e in reversed(rank.of(IndicesRead)) if (e.loader, e.epoch) == number), None
    )
    return told.batches - told.backwards if told else 0


def _steps(rank: Rank) -> str:
    """`3 of 6`, of the last iteration that ran dry."""
    told = next((e for e in reversed(rank.of(EpochEnded)) if e.exhausted), None)
    return f"{told.backwards} of its {told.batches}" if told else "some"
