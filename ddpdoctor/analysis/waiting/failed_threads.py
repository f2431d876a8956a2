"""Exceptions that ended a thread of a rank, or its program while a thread keeps the process."""

from __future__ import annotations

from ...events import ThreadFailed
from ...report.findings import Related
from .failures import Failure, lost_peer
from .snapshot import RankSnapshot, Snapshot

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


def program_error(stand: RankSnapshot) -> str:
    """`IndexError: list index out of range (train.py:12)`, for the exception that ended the program
    of a rank whose process goes on; empty for none."""
    raised = stand.rank.exception
    if raised is None or raised.caught or lost_peer(raised):
        return ""
    failed = Failure(stand.rank, stand.rank.wall(raised.at), "exception", raised)
    return f"{failed.text} ({failed.location})" if failed.location else failed.text
