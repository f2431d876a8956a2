"""DDP608."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.waiting import failed_threads
from ddpdoctor.analysis.waiting.failures import failures
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ddpdoctor.analysis.waiting.wait_graph import (
    merged_stacks,
    missing,
    overdue,
    victims,
    wait_lines,
    waiting_for,
)
from ddpdoctor.events import LoaderSeen, RankStood, StackFrame, Worker
from ddpdoctor.report.declarations import Effect, seen
from ddpdoctor.report.findings import (
    Check,
    Confidence,
    Evidence,
    Finding,
    FixKind,
    Related,
    Severity,
)
from ddpdoctor.run import Phase, Rank, Run, ranks_text

WORKER_DIED = re.compile(r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)")

WORKERS = (
    'start the workers with `multiprocessing_context="forkserver"`, open files and locks inside '
    "the worker, and pass `timeout=60` to the DataLoader"
)
SLEEPS = (
    "find where the code of the data set sleeps or retries, and add a limit: with `num_workers=0` "
    "the report names the line; with `timeout=60` the DataLoader itself raises when no batch comes"
)
LOCKED = (
    "release the lock on every way out of the data set's code (`with`, or `finally:`), and keep no "
    "file open that is locked; `lslocks` on that machine shows who holds it"
)
NO_WORKERS = (
    "see what this line waits for on that rank (a file, a lock, the network) and add a limit; with "
    "`num_workers=1` and `timeout=60` the DataLoader itself raises when no batch comes"
)
_FILE_LOCK = re.compile(r"lock_(?:inode|file)_wait|fcntl_(?:set|get)lk")
"""Kernel functions that wait for a lock on a file."""


class DataStall(Check):
    """A rank waits for a batch that does not come

    ## What it finds
    Ranks that are in `next` of their DataLoader longer than the stall time, and what its workers
    do: gone, waiting for a lock (of a thread, or on a file), sleeping, reading, or computing. Also
    a worker that died, where torch raises for it.

    ## How it knows
    Each rank records when it enters and leaves `next` of its loader. Once the run has stood still
    for the stall time (see `rank-missing`), the node's monitor takes the stacks, also those of up
    to eight workers that were forked, and reads from `/proc` what the workers do. A stall is
    suspected; that a worker died is proven by torch's own error.

    ## Why it hurts
    A worker that is stuck (a lock held when the process was forked, a file system that does not
    answer) never delivers its batch; the other ranks wait in a collective, and torch waits without
    a limit.

    ## How to fix it
    Start workers with `multiprocessing_context="forkserver"`, start no threads before the loader,
    open files inside the worker, and pass `timeout=` to the loader so that it raises. Where a rank
    forks while a thread of gloo takes the GIL, Python itself may block in `os.fork` of the worker
    (CPython issue 112275; solved in 3.12): `persistent_workers=True` forks once, not in each epoch.

    ## When it stays quiet
    - A slow first batch that comes in the end.
    - Data loading that is merely slow: see `data-bound`.
    """

    code = "DDP608"
    name = "data-stall"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "worker-died": "torch raised because a worker's process ended",
        "no-workers": "the data set itself does not return, in the rank's own process",
        "worker-stopped": "a worker was stopped by a signal",
        "worker-lock": "a worker waits for a lock of a thread",
        "worker-sleeps": "a worker sleeps",
        "file-lock": "workers wait for a lock on a file",
        "unobserved": "what the workers do was not seen",
        "workers-stalled": "the workers do not deliver the next batch",
    }
    requires = (seen(LoaderSeen, otherwise="no DataLoader was seen"),)
    effects = (Effect(("rank-missing", "stall", "first-failure")),)

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._died(run)
        now = snapshot_of(run)
        stuck = [s for s in missing(now) if s.phase is Phase.DATA]
        if not stuck and now.stall is not None and not now.blocked:
            stuck = [s for s in now.by_rank.values() if s.phase is Phase.DATA and not s.gone]
        if stuck and (now.stall is not None or overdue(run, now, stuck)):
            yield self._report(now, stuck)

    def _died(self, run: Run) -> Iterable[Finding]:
        """The process of a worker ended, and torch raised for it."""
        found = [
            f for f in failures(run) if f.exception and WORKER_DIED.search(f.exception.message)
        ]
        if not found:
            return
        first = found[0]
        loader = _loader(first.rank)
        message = first.exception.message if first.exception else ""
        # torch raises it in a signal handler, at whatever line the rank is.
        loop = first.rank.location(loader.loop_site) if loader else None
        noticed = first.location if loop is not None and first.location != loop else None
        ranks = tuple(sorted(f.rank.rank for f in found))
        yield self.finding(
            rule="worker-died",
            ranks=ranks,
            subjects=(loader.dataset,) if loader else (),
            location=loop or first.location,
            label="waits for batches of the worker that died",
            related=(Related("noticed here", noticed),) if noticed else (),
            summary=f"a DataLoader worker of {ranks_text(ranks)} died: {message.splitlines()[0]}",
            cause=_worker_end(message),
            fix="use `num_workers=0` to see an error of the data set itself; if memory ran out, "
            "use fewer workers; if /dev/shm is full, start the container with `--shm-size=8g`",
            fix_kind=FixKind.CHECK,
            evidence={"message": message[:1000], "workers": loader.workers if loader else None},
            at=first.at,
        )

    def _report(self, now: Snapshot, stuck: list[RankSnapshot]) -> Finding:
        first = stuck[0]
        ranks = tuple(s.rank.rank for s in stuck)
        waiting = [s for one in stuck for s in waiting_for(now, one)]
        loader = _loader(first.rank)
        workers = loader is None or bool(loader.workers)
        loop = first.rank.location(first.phase_site)
        at = _worker_frame(first.stood)
        where = (loop or first.location) if workers else (first.location or loop)
        if at is not None:
            where = first.rank.frame_location(at)
        waited, still = now.waited(stuck), max(s.still_s for s in stuck)
        thread = failed_threads.failed_thread(now, first)
        related = [*failed_threads.failed_thread_line(thread, first), *wait_lines(waiting)]
        if loop is not None and loop != where:
            related.insert(0, Related("the loop over the loader", loop))
        rule = _rule(first.stood, loader)
        return self.finding(
            rule=rule,
            ranks=ranks,
            confidence=Confidence.SUSPECTED,
            steps=first.steps,
            subjects=(loader.dataset,) if loader else (),
            location=where,
            label="a worker stands here" if at else f"no batch for {waited:.0f} s",
            related=tuple(related),
            summary=f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} waited "
            f"{waited:.0f} s for a batch; " + _workers_text(first.stood, loader),
            cause=_cause(rule, first.stood, loader, at)
            + failed_threads.failed_thread_remark(thread),
            fix=_fix(rule, at) if workers else NO_WORKERS,
            fix_kind=FixKind.CHECK,
            evidence={
                **_workers(first.stood),
                **victims(now, waiting),
                "hang_after_s": round(now.hang_after, 1),
                "stacks": merged_stacks(now),
            },
            at=now.at - still,
        )


def _worker_end(message: str) -> str:
    if "Killed" in message:
        return "it was killed from outside, most often because memory ran out"
    if "Bus error" in message:
        return "it ran out of shared memory (/dev/shm)"
    if "Segmentation" in message or "Aborted" in message:
        return "it crashed in native code"
    return "its process ended without a Python error: killed, out of shared memory, or `os._exit`"


def _loader(rank: Rank) -> LoaderSeen | None:
    return rank.latest(LoaderSeen)


def _workers(stood: RankStood | None) -> Evidence:
    rows = [
        {
            "pid": w.pid,
            "state": w.state,
            "cpu_s": w.cpu_s,
            "waits_in": w.waits_in,
            **({"at": at} if (at := _places(w)) else {}),
        }
        for w in (stood.workers if stood else ())
    ]
    return {"workers": rows}


def _places(worker: Worker) -> str:
    """`index (train.py:13) <- load (train.py:9)`."""
    users = [f for f in worker.frames if f.user][:3] or worker.frames[:1]
    return " <- ".join(f"{f.function} ({f.file.rpartition('/')[2]}:{f.line})" for f in users)


def _workers_text(stood: RankStood | None, loader: LoaderSeen | None) -> str:
    if stood is None:
        return "what the workers do was not seen"
    if not loader or not loader.workers:
        return "there are no workers: the data set itself does not return"
    alive = [w for w in stood.workers if w.state not in ("Z", "X")]
    lost = loader.workers - len(alive)
    if lost > 0:
        return f"{lost} of its {loader.workers} workers {'is' if lost == 1 else 'are'} gone"
    states = fold_states(stood)
    those = "worker is" if loader.workers == 1 else f"{loader.workers} workers are"
    return f"its {those} alive: {states}"


def fold_states(stood: RankStood) -> str:
    """`2 sleeping in futex_wait_queue`."""
    words = {"S": "sleeping", "D": "in a system call", "R": "running", "T": "stopped", "Z": "dead"}
    counts: dict[str, int] = {}
    for worker in stood.workers:
        inside = f" in {worker.waits_in}" if worker.waits_in else ""
        key = words.get(worker.state, worker.state) + inside
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{n} {what}" for what, n in counts.items())


def _rule(stood: RankStood | None, loader: LoaderSeen | None) -> str:
    """Why no batch comes; what stops a worker for good comes before what may pass."""
    if loader is not None and not loader.workers:
        return "no-workers"
    if stood is None or loader is None:
        return "unobserved"
    if any(w.state == "T" for w in stood.workers):
        return "worker-stopped"
    if any("futex" in w.waits_in for w in stood.workers):
        return "worker-lock"
    if _sleeps(stood):
        return "worker-sleeps"
    return "file-lock" if _locked(stood) else "workers-stalled"


def _worker_frame(stood: RankStood | None) -> StackFrame | None:
    """The user's line at which a worker stands: one that waits for work runs no such code."""
    for worker in stood.workers if stood is not None else ():
        frame = next((f for f in worker.frames if f.user), None)
        if frame is not None:
            return frame
    return None


def _fix(rule: str, at: StackFrame | None) -> str:
    if at is None:
        return FIXES.get(rule, WORKERS)
    return AT_LINE.get(rule, FIXES.get(rule, AT_LINE["workers-stalled"]))


def _cause(
    rule: str, stood: RankStood | None, loader: LoaderSeen | None, at: StackFrame | None
) -> str:
    if at is not None and rule == "worker-lock":
        return (
            f"a worker waits in {at.function} for a lock that another thread held when the worker "
            "was forked, or that the worker itself has taken already and not released"
        )
    match rule:
        case "worker-stopped":
            return "a worker is stopped by a signal"
        case "worker-lock":
            return (
                "a worker waits for a lock, typically one that another thread held when the worker "
                "was forked"
            )
        case "worker-sleeps" if loader:
            return f"a worker sleeps (`time.sleep`) in the code that loads {loader.dataset}"
        case "file-lock" if stood:
            return (
                f"{_on_lock(stood)} for a lock on a file (`flock`, `lockf`) that another process "
                "holds, or a worker itself through a file that it keeps open"
            )
        case "workers-stalled":
            return "the workers do not deliver the next batch"
    return "the code that produces the batch does not return"


AT_LINE = {
    "worker-lock": "if code that holds the lock calls this line, use `threading.RLock()` or take "
    "the lock once; if a thread of the program may hold it when workers start, start them with "
    '`multiprocessing_context="forkserver"`, and make a lock that the dataset holds in the worker: '
    "it cannot be pickled",
    "worker-sleeps": "add a limit to the waiting here; with `timeout=60` the DataLoader raises "
    "when no batch comes",
    "workers-stalled": "see what this line waits for (a file, a queue, the network) and add a "
    "limit; with `timeout=60` the DataLoader raises when no batch comes",
}
"""The same where the line is known at which a worker stands."""
FIXES = {"worker-sleeps": SLEEPS, "file-lock": LOCKED}
"""What to do about workers that deliver nothing, by rule."""


def _locked(stood: RankStood | None) -> bool:
    """Whether workers wait for a lock on a file and none computes."""
    workers = stood.workers if stood is not None else ()
    return any(map(_for_file, workers)) and not any(w.state == "R" for w in workers)


def _on_lock(stood: RankStood) -> str:
    count = sum(map(_for_file, stood.workers))
    if count == len(stood.workers):
        return "the worker waits" if count == 1 else "all workers wait"
    return f"{count} of the workers {'waits' if count == 1 else 'wait'}"


def _for_file(worker: Worker) -> bool:
    return _FILE_LOCK.search(worker.waits_in) is not None


def _sleeps(stood: RankStood | None) -> bool:
    """Whether a worker waits only for time to pass."""
    return stood is not None and any("nanosleep" in w.waits_in for w in stood.workers)
