"""Threads of a rank: what it waits for may have been to do for one that ended with an exception, or
one makes calls in the group of the main thread."""

from __future__ import annotations

from ...events import CallSite, Site, ThreadFailed
from ...report.findings import Related
from ...run import Rank
from ..calls.call_logs import CallRecord, lines
from ..waiting.snapshot import RankSnapshot, Snapshot
from .divergence import CallDivergence

FIX = (
    "mend what the thread failed at, and let the one that waits for it know of a failure: put the "
    "error into the queue, or wait for a `Future`, whose `result()` raises it"
)


def failed(now: Snapshot, stand: RankSnapshot) -> ThreadFailed | None:
    """The last thread of an idle rank that failed by then."""
    rank = stand.rank
    if stand.stood is None or stand.busy or stand.stopped or stand.blocked:
        return None
    return next((e for e in reversed(rank.of(ThreadFailed)) if rank.wall(e.at) <= now.at), None)


def remark(thread: ThreadFailed | None) -> str:
    """What it may have to do with the wait, after what is told of that."""
    if thread is None:
        return ""
    first = thread.message.strip().splitlines()[:1]
    why = ": ".join([thread.kind, *first])
    return (
        f"; its thread {thread.thread} had ended with {why[:200]}: what the rank waits for there "
        "never comes if that thread was to deliver it"
    )


def place(thread: ThreadFailed | None, stand: RankSnapshot) -> tuple[Related, ...]:
    """The line that it failed at."""
    frames = [f for f in thread.frames if f.user] if thread is not None else []
    if thread is None or not frames:
        return ()
    spot = stand.rank.location_of(frames[-1].file, frames[-1].line)
    return (Related(f"thread {thread.thread} of rank {stand.rank.rank} failed here", spot),)


GROUP = (
    "give the thread a group of its own (`dist.new_group()` on every rank, used by nothing else), "
    "or make the call in the main thread"
)
GROUP_PASSED = (
    "make a group for it once, on every rank and used by nothing else (`own = dist.new_group()`), "
    "and pass it to what this line starts (`async_save` takes it as `process_group=own`)"
)


def aside(divergence: CallDivergence) -> CallRecord | None:
    """The call of a thread that met one of the main thread, where all ranks make it somewhere."""
    every = list(divergence.made.values())
    made = next((m for m in every if m.site and m.site.thread), None)
    if made is None or not any(m.site and not m.site.thread for m in every):
        return None
    return made if all(_comes(m.rank, made) for m in every) else None


def _comes(rank: Rank, made: CallRecord) -> bool:
    """Whether a rank makes that call in a thread too, or was at the line that starts its thread."""
    if started(made):
        return any(rank.location(site.id) == made.location for site in rank.of(Site))
    return any(s.thread and lines(rank, s) == made.text for s in rank.of(CallSite))


def started(made: CallRecord) -> bool:
    """Whether the line shown is not that of the call, but the one that started its thread."""
    return made.site is not None and not made.site.places


def order(made: CallRecord) -> str:
    """What is wrong with such a call."""
    thread = made.site.thread if made.site else ""
    what = f"{made.signature.op} in thread {thread}, which it starts here,"
    what = what if started(made) else f"this call in its thread {thread},"
    return (
        f"rank {made.rank.rank} makes {what} and its order against "
        "those of the main thread in the same group is not the same on all ranks"
    )


def remedy(made: CallRecord) -> str:
    """What to do about it."""
    return GROUP_PASSED if started(made) else GROUP
