"""Groups that are formed over a store that still has the addresses of an earlier group."""

from __future__ import annotations

from ...events import InitEntered
from ...run import Location, Run, State
from .snapshot import RankSnapshot

CAUSE = (
    "the default group was formed again on the store of an earlier one, under the same keys: the "
    "store still has the addresses of the destroyed group, and a rank that arrives before the "
    "others connects to those, where nobody answers"
)
FIX = (
    "form the group once and destroy it at the end (use `dist.new_group` for more groups); or give "
    "each group a prefix in the store: `init_process_group(backend, store=dist.PrefixStore("
    'f"group {n}", store), rank=rank, world_size=world_size)`'
)


EARLIER_S = 1.0
"""How long before the start of the run a file was written, at least: clocks of file systems are
coarse."""


def left_by_earlier_run(run: Run) -> float | None:
    """How many seconds before the run the file of the store was last written, where it had contents
    before any rank of this run came to it; None otherwise."""
    entered = [e for r in run.ranks.values() if (e := r.first(InitEntered)) is not None]
    if not entered or any(not e.store_written for e in entered):
        return None
    before = run.started - min(e.store_written for e in entered)
    return before if before >= EARLIER_S else None


def formed_again(stands: list[RankSnapshot]) -> Location | None:
    """The line that formed the group in which ranks wait, where each rank formed one before on the
    same store and no call completed in this one; None otherwise."""
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
