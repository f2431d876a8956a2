"""Process groups that several threads of a rank use at a time."""

from __future__ import annotations

from dataclasses import dataclass

from ...events import CallSite
from ...run import Location, Rank
from ..calls.call_logs import GroupKey
from .device_waits import flight_log
from .snapshot import Snapshot

FIX = (
    "give the thread a group of its own: `group = dist.new_group()` once on all ranks in the main "
    "thread, then `group=group` in the thread's calls (`process_group=group` for `async_save`); or "
    "make these calls in the main thread"
)


@dataclass(frozen=True)
class SharedGroup:
    """A group that the main thread and another one use.

    Attributes:
        thread: the name of the other one; line: one at which it calls, or the one that started it,
            where torch makes its calls.
        mixed: torch's flight recorder has the calls of the ranks in different orders.
    """

    key: GroupKey
    rank: Rank
    thread: str
    line: Location
    mixed: bool

    @property
    def cause(self) -> str:
        known = ", and torch's flight recorder shows that it did" if self.mixed else ""
        return (
            f"the main thread and thread {self.thread} ({self.line}) both use {self.key}: "
            "collectives are matched by the order in which a rank issues them, which depends on "
            f"the timing of its threads and may differ between ranks{known}"
        )


def shared_group(now: Snapshot, key: GroupKey | None) -> SharedGroup | None:
    """The group, if threads besides the main one have made calls in it: of the program, or of
    torch's own in a thread that the program started, as a checkpoint does."""
    if key is None:
        return None
    mixed = _mixed(now, key)
    for log in now.known.logs.get(key, {}).values():
        used = {site for segment in log.segments for _, site in segment.codes}
        sites = [s for s in log.rank.of(CallSite) if s.id in used]
        if not any(site.thread == "" for site in sites) and not mixed:
            continue
        for site in sites:
            own = site.places and not site.internal
            line = log.rank.location(site.line if own else site.started)
            if site.thread and line is not None:
                return SharedGroup(key, log.rank, site.thread, line, mixed)
    return None


def _mixed(now: Snapshot, key: GroupKey) -> bool:
    """Whether ranks have different operations in flight at one number of the flight recorder."""
    found: dict[int, set[str]] = {}
    for stand in now.by_rank.values():
        log = flight_log(stand.rank, key)
        for entry in log.entries if log else ():
            if not entry.retired:
                found.setdefault(entry.sequence, set()).add(entry.op)
    return any(len(ops) > 1 for ops in found.values())
