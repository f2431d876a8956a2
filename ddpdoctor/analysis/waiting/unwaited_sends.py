"""Messages that were begun with `isend` and never waited for: torch may lose them."""

from __future__ import annotations

from collections.abc import Container

from ...run import State
from ..calls.call_logs import CallRecord
from .snapshot import RankSnapshot, Snapshot

KEEP_HANDLES = (
    "keep each handle and its tensor until it is waited for: "
    "`works.append(dist.isend(...))`, then `for w in works: w.wait()`"
)


def unwaited_send(now: Snapshot, sender: RankSnapshot, to: Container[int]) -> CallRecord | None:
    """The first `isend` of a rank to one of these ranks that was issued and not waited for."""
    for call in sender.rank.ring.calls if sender.rank.ring else ():
        if call.index >= 0 or call.peer not in to or call.state is not State.RETURNED:
            continue
        made = now.known.point_to_point(sender.rank, call)
        if made.signature.op == "isend":
            return made
    return None
