"""What a rank caught, so that it left something out that the others did."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import ExceptionPassed
from ddpdoctor.findings import Location
from ddpdoctor.run import Rank

from ._failures import LOST_PEER
from ._log import Made


def caught(ranks: Iterable[Rank], others: Iterable[Rank], ways: Iterable[Location] = ()) -> str:
    """`rank 1 caught ValueError: bad sample (data.py:12) in the forward of step 7`, of exceptions
    that the other ranks did not have; empty where none was seen: those that are raised outside of
    what is watched are not, unless a handler logs them. Of these, only those of the handlers among
    these `ways` count."""
    theirs = {_key(rank, event) for rank in others for event in rank.of(ExceptionPassed)}
    for rank in ranks:
        mine = {
            _key(rank, e): e
            for e in reversed(rank.of(ExceptionPassed))
            if not LOST_PEER.search(e.message) and (e.tried < 0 or handler(rank, e, ways))
        }
        own = [e for key, e in reversed(mine.items()) if key not in theirs]
        if own and rank.exception is None:
            first, more = own[0], len(own) - 1
            spot = rank.location(first.site)
            return (
                f"rank {rank.rank} caught {first.text}"
                + (f" ({spot})" if spot else "")
                + f" {_PLACE[first.where]} step {first.step}"
                + (f" and {more} more" if more else "")
            )
    return ""


def handler(rank: Rank, event: ExceptionPassed, ways: Iterable[Location]) -> Location | None:
    """Which of these ways to cut a round short is the handler that was seen to have it."""
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


def way_out(made: Made) -> str:
    """`rank 0 came to `finally:` (train.py:100) after ValueError: bad sample (data.py:12)`, where
    that is the last that it met before this call; empty where the call is in no `finally`."""
    rank, call = made.rank, made.call
    around = [
        (spot.file, around.line)
        for place in (made.site.places if made.site else ())
        for around in place.inside
        if around.text.startswith("finally:") and (spot := rank.location(place.site))
    ]
    passed = [e for e in rank.of(ExceptionPassed) if call and e.at <= call.began and e.tried < 0]
    if call is None or rank.ring is None or not around or not passed:
        return ""
    before = [c.ended for c in rank.ring.last_calls if c.number < call.number]
    if max(before, default=0.0) > passed[-1].at or LOST_PEER.search(passed[-1].message):
        return ""
    spot = rank.location(passed[-1].site)
    file, line = around[0]
    return (
        f"rank {rank.rank} came to `finally:` ({file}:{line}) after {passed[-1].text}"
        f"{f' ({spot})' if spot else ''}"
    )


_PLACE = {
    "forward": "in the forward of",
    "backward": "in the backward of",
    "data": "where it loads the batch for",
    "handler": "in",
}


def _key(rank: Rank, event: ExceptionPassed) -> tuple[str, str, int]:
    return event.kind, str(rank.location(event.site)), event.step
