"""Threads of a rank that ended with an exception: what it waits for may have been theirs to do."""

from __future__ import annotations

from ddpdoctor.events import ThreadFailed
from ddpdoctor.findings import Related

from ._scene import Scene, Stand

FIX = (
    "mend what the thread failed at, and let the one that waits for it know of a failure: put the "
    "error into the queue, or wait for a `Future`, whose `result()` raises it"
)


def failed(now: Scene, stand: Stand) -> ThreadFailed | None:
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


def place(thread: ThreadFailed | None, stand: Stand) -> tuple[Related, ...]:
    """The line that it failed at."""
    frames = [f for f in thread.frames if f.user] if thread is not None else []
    if thread is None or not frames:
        return ()
    spot = stand.rank.location_of(frames[-1].file, frames[-1].line)
    return (Related(f"thread {thread.thread} of rank {stand.rank.rank} failed here", spot),)
