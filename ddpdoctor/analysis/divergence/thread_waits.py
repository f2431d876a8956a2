"""Threads of a rank: one that failed may be what the rank waits for; one that calls collectives may
use the group of the main thread."""

from __future__ import annotations

from ...events import CallSite, Site, ThreadFailed
from ...report.findings import Related
from ...run import Rank
from ..calls.call_logs import CallRecord, lines
from ..waiting.snapshot import RankSnapshot, Snapshot
from .divergence import CallDivergence

FIX = (
    "correct the error in the thread, and report failures to the thread that waits: put the error "
    "into the queue, or wait for a `Future`, whose `result()` raises it"
)


def failed_thread(now: Snapshot, stand: RankSnapshot) -> ThreadFailed | None:
    """The last failed thread of a rank that is idle; None for none."""
    rank = stand.rank
    if stand.stood is None or stand.busy or stand.stopped or stand.blocked:
        return None
    return next((e for e in reversed(rank.of(ThreadFailed)) if rank.wall(e.at) <= now.at), None)


def failed_thread_remark(thread: ThreadFailed | None) -> str:
    """A sentence for the end of a cause: how a failed thread may be why the rank waits."""
    if thread is None:
        return ""
    first = thread.message.strip().splitlines()[:1]
    why = ": ".join([thread.kind, *first])
    return (
        f'. The rank\'s thread "{thread.thread}" failed earlier with {why[:200]}; if the rank is '
        "waiting for that thread's result, it waits forever"
    )


def failed_thread_line(thread: ThreadFailed | None, stand: RankSnapshot) -> tuple[Related, ...]:
    """The line on which a thread failed."""
    frames = [f for f in thread.frames if f.user] if thread is not None else []
    if thread is None or not frames:
        return ()
    spot = stand.rank.location_of(frames[-1].file, frames[-1].line)
    return (Related(f"thread {thread.thread} of rank {stand.rank.rank} failed here", spot),)


OWN_GROUP = (
    "give the thread a process group of its own (`dist.new_group()` on every rank, used by nothing "
    "else), or make the call in the main thread"
)
OWN_GROUP_PASSED = (
    "create a group once, on every rank and used by nothing else (`own = dist.new_group()`), and "
    "pass it to what this line starts (`async_save(..., process_group=own)`)"
)


def call_of_thread(divergence: CallDivergence) -> CallRecord | None:
    """The call of a thread that was matched with one of the main thread, where every rank makes
    that call; None for none."""
    every = list(divergence.calls.values())
    made = next((m for m in every if m.site and m.site.thread), None)
    if made is None or not any(m.site and not m.site.thread for m in every):
        return None
    return made if all(_comes(m.rank, made) for m in every) else None


def _comes(rank: Rank, made: CallRecord) -> bool:
    """Whether a rank makes the call in a thread too, or was at the line that starts its thread."""
    if only_start_is_known(made):
        return any(rank.location(site.id) == made.location for site in rank.of(Site))
    return any(s.thread and lines(rank, s) == made.text for s in rank.of(CallSite))


def only_start_is_known(made: CallRecord) -> bool:
    """Whether the line on record is not that of the call but the one that started its thread."""
    return made.site is not None and not made.site.places


def order_text(made: CallRecord) -> str:
    """What is wrong with a call of a thread."""
    thread = made.site.thread if made.site else ""
    what = f"this call in its thread {thread}"
    if only_start_is_known(made):
        what = f"{made.signature.op} in thread {thread}, which it starts here"
    return (
        f"rank {made.rank.rank} makes {what}; relative to the calls of the main thread in the same "
        "group, its order is not the same on all ranks"
    )


def group_fix(made: CallRecord) -> str:
    """What to do about a call of a thread."""
    return OWN_GROUP_PASSED if only_start_is_known(made) else OWN_GROUP
