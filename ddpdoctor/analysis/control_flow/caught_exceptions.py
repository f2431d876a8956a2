"""Exceptions that a rank caught, so that it skipped calls that the others made."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...events import CallSite, ExceptionPassed
from ...run import Location, Rank
from ..calls.call_logs import CallRecord
from ..waiting.failures import LOST_PEER
from .branches import around

_WITH = ("with ", "async with ")


def caught(ranks: Iterable[Rank], others: Iterable[Rank], ways: Iterable[Location] = ()) -> str:
    """`rank 1 caught ValueError: bad sample (data.py:12) in the forward of step 7`, for exceptions
    that the other ranks did not have; empty where none was seen.

    Exceptions outside of a forward, a backward or a loader are only seen where a handler logs them.

    Args:
        ways: handlers; what another handler logged does not count.
    """
    theirs = {_key(rank, event) for rank in others for event in rank.of(ExceptionPassed)}
    for rank in ranks:
        mine = {
            _key(rank, e): e
            for e in reversed(rank.of(ExceptionPassed))
            if not LOST_PEER.search(e.message) and (e.tried < 0 or handler(rank, e, ways))
        }
        own = [e for key, e in reversed(mine.items()) if key not in theirs]
        if own and rank.exception is None:
            return caught_text(rank, own)
    return ""


def caught_text(rank: Rank, events: Sequence[ExceptionPassed]) -> str:
    """`rank 1 caught ValueError: bad sample (data.py:12) in the forward of step 7 and 2 more`."""
    first, more = events[0], len(events) - 1
    spot = rank.location(first.site)
    return (
        f"rank {rank.rank} caught {first.text}"
        + (f" ({spot})" if spot else "")
        + f" {_PLACE[first.where]} step {first.step}"
        + (f" and {more} more" if more else "")
    )


def handler(rank: Rank, event: ExceptionPassed, ways: Iterable[Location]) -> Location | None:
    """The handler among `ways` that was seen to catch an exception; None for none."""
    if event.where != "handler":
        return None
    tried = rank.location(event.tried)
    return next(
        (
            way
            for way in sorted(ways, key=lambda w: w.line)
            if tried and (way.file, way.function) == (tried.file, tried.function)
            if way.source.startswith("except") and tried.line < way.line
        ),
        None,
    )


TOGETHER = (
    "`all_reduce` an error flag on every rank after the `try`, before any other collective, and "
    "skip on all ranks or on none"
)
"""What to do where a rank skips what raised on it."""


def skip_together(
    ranks: Collection[Rank], skipped: Iterable[Rank], ways: Collection[Location]
) -> str:
    """What to do where ranks skip what raised on them: a flag that is sent after the `try` would be
    matched with a collective in it, which the other ranks call.

    Args:
        ranks: all that take part; `skipped` those that skip.
        ways: handlers that may have caught it.
    """
    events = [(rank, e) for rank in skipped for e in rank.of(ExceptionPassed)]
    tried = {spot for rank, e in events if (spot := rank.location(e.tried)) is not None}
    inside = {call for rank in ranks for call in _calls_in_try(rank, tried, ways)}
    after = {c for c in inside if all(c.line > t.line for t in tried if _same(c, t))}
    where = {e.where for _, e in events} & {"forward", "backward", "data"}
    if after and (tried or (len(after) == 1 and where and "backward" not in where)):
        first = min(after, key=lambda c: c.line)
        return (
            f"end the `try` before `{first.source.strip()}` ({first}), which communicates: there, "
            "`all_reduce` an error flag on every rank, and skip that line and the rest of the "
            "round on all ranks or on none"
        )
    if inside and "backward" in where and not (after and tried):
        last = max(inside, key=lambda c: c.line)
        return (
            f"where `{last.source.strip()}` ({last}) raises, the other ranks wait in it, and no "
            "flag reaches them: raise the exception again, so that the rank exits"
        )
    return TOGETHER


def _calls_in_try(
    rank: Rank, tried: Collection[Location], ways: Collection[Location]
) -> Iterator[Location]:
    """The lines of a rank that call collectives in a `try`, at the line in it that raised or below;
    where no such line is known, those in a `try` that one of the handlers `ways` belongs to."""
    handlers = {(w.file, w.line) for w in ways if not tried}
    for site in rank.of(CallSite):
        for _, spot, head in around(rank, site):
            if head.kind == "try" and (
                any(_same(spot, t) and head.line < t.line <= spot.line for t in tried)
                or any((spot.file, way.line) in handlers for way in head.ways)
            ):
                yield spot


def _same(here: Location, there: Location) -> bool:
    """Whether two lines are in one function."""
    return (here.file, here.function) == (there.file, there.function)


@dataclass(frozen=True)
class ExceptionExit:
    """An exception that led a rank to a call.

    Attributes:
        head: the `finally` or handler in which the call is, or the `with` whose `__exit__` makes
            it.
    """

    rank: Rank
    head: Location
    event: ExceptionPassed

    @property
    def cause(self) -> str:
        """`rank 0 reached `finally:` (train.py:100) after ValueError: bad sample (data.py:12)`."""
        spot = self.rank.location(self.event.site)
        head = f"`{self.head.source}` ({self.head})"
        reached = "left" if self.head.source.startswith(_WITH) else "reached"
        return (
            f"rank {self.rank.rank} {reached} {head} after {self.event.text}"
            f"{f' ({spot})' if spot else ''}"
        )

    @property
    def fix(self) -> str:
        if self.head.source.startswith(_WITH):
            return (
                "do not call collectives in `__exit__` when an exception leaves the block "
                "(`if kind is None:`), so that a failing rank exits instead of waiting there; and "
                "correct the exception"
            )
        if self.head.source.startswith("finally"):
            return (
                "do not call collectives in `finally`, which also runs when an exception "
                "propagates: move the call after the `try`, so that a failing rank exits instead"
            )
        return (
            f"do not call collectives under `{self.head.source}`, which only a failing rank "
            "enters: let it exit there, or `all_reduce` an error flag after the `try`"
        )


def way_out(made: CallRecord) -> ExceptionExit | None:
    """The exception that led to a call in a `finally` or a handler, where nothing happened on the
    rank in between; None otherwise."""
    rank, call = made.rank, made.call
    if call is None or rank.ring is None:
        return None
    before = max((c.ended for c in rank.ring.last_calls if c.number < call.number), default=0.0)
    passed = [e for e in rank.of(ExceptionPassed) if e.at <= call.began and e.where != "handler"]
    if not passed or passed[-1].at < before or LOST_PEER.search(passed[-1].message):
        return None
    found = (ExceptionExit(rank, head, passed[-1]) for head in _heads(made))
    return next((out for out in found if _leads_to(out)), None)


def _heads(made: CallRecord) -> Iterator[Location]:
    """The `finally` and the handlers around a call, and the `with` whose `__exit__` makes it."""
    for _, spot, head in around(made.rank, made.site):
        if head.kind in ("finally", "except"):
            yield Location(spot.file, head.line, spot.function, head.text)
    sites = made.site.places if made.site else ()
    for inner, outer in itertools.pairwise(sites):
        here, caller = made.rank.location(inner.site), made.rank.location(outer.site)
        if here and caller and here.function in ("__exit__", "__aexit__"):
            yield Location(caller.file, caller.line, caller.function, caller.source.strip())


def _leads_to(out: ExceptionExit) -> bool:
    """Whether an exception led to its `finally` or handler; one of unknown origin may lead to any
    `finally`, but to no handler."""
    tried = out.rank.location(out.event.tried)
    if tried is None:
        return out.head.source.startswith("finally")
    same = (tried.file, tried.function) == (out.head.file, out.head.function)
    if out.head.source.startswith(_WITH):
        return same and tried.line > out.head.line
    return same and tried.line < out.head.line and out.event.kind != "StopIteration"


_PLACE = {
    "forward": "in the forward of",
    "backward": "in the backward of",
    "data": "while loading the batch of",
    "handler": "in",
}


def _key(rank: Rank, event: ExceptionPassed) -> tuple[str, str, int]:
    return event.kind, str(rank.location(event.site)), event.step
