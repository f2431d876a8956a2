"""Groups that are formed again over a store which still holds the addresses of the earlier one."""

from __future__ import annotations

from ...events import InitEntered
from ...run import Location, State
from .snapshot import RankSnapshot

CAUSE = (
    "the default group was formed again at an address where an earlier one had been: both leave "
    "the addresses of their ranks under the same keys of one store, so that a rank that comes "
    "sooner than another finds those of the group that is gone, and nobody answers there"
)
FIX = (
    "form the group once, and destroy it at the end (`dist.new_group` makes more of them); or give "
    "each group names of its own in the store: `init_process_group(backend, store=dist.PrefixStore("
    'f"group {n}", store), rank=rank, world_size=world_size)`'
)


def formed_again(stands: list[RankSnapshot]) -> Location | None:
    """Where the group was formed in which these ranks wait, if each formed one before at the same
    place, and nothing came through in this one."""
    latest = [_latest(stand) for stand in stands]
    if not stands or any(event is None for event in latest):
        return None
    first, event = stands[0], latest[0]
    return first.rank.location(event.site) if event else None


def _latest(stand: RankSnapshot) -> InitEntered | None:
    every = stand.rank.of(InitEntered)
    if len(every) < 2 or not every[-1].rendezvous:
        return None
    *earlier, last = every
    calls = stand.rank.ring.calls if stand.rank.ring else ()
    came = any(c.began >= last.at and c.state is State.DONE for c in calls)
    return None if came or all(e.rendezvous != last.rendezvous for e in earlier) else last
