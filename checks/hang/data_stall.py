"""DDP608."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddpdoctor.analysis.divergence import thread_waits
from ddpdoctor.analysis.waiting.failures import failures
from ddpdoctor.analysis.waiting.patience import overdue
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, scene
from ddpdoctor.analysis.waiting.wait_graph import merged_stacks, missing, victims, waiting_for
from ddpdoctor.events import LoaderSeen, RankStood, Worker
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
    "see where the data set's own code sleeps or tries again, and give that a limit: with "
    "`num_workers=0` the report names the line; with `timeout=60` the DataLoader itself raises "
    "where no batch comes"
)
LOCKED = (
    "give the lock back on every way out of the data set's code (`with`, or `finally:`), and keep "
    "no file open that it is on; `lslocks` on that machine tells who holds it"
)
NO_WORKERS = (
    "see what this line waits for on that rank (a file, a lock, the network) and give it a limit; "
    "with `num_workers=1` and `timeout=60` the DataLoader itself raises where no batch comes"
)
_FILE_LOCK = re.compile(r"lock_(?:inode|file)_wait|fcntl_(?:set|get)lk")
"""Functions of the kernel."""


class DataStall(Check):
    """A rank waits for a batch that does not come

    ## What it finds
    Ranks that stand in their DataLoader's `next` longer than the stall time, and what their workers
    do: gone, stuck in a lock (of a thread, or on a file), sleeping, reading, or computing. Also a
    worker that died, where torch raises for it.

    ## How it knows
    Each rank writes down when it goes into its loader's `next` and when it comes out. Once the run
    has stood still for the stall time (see `rank-missing`), the node's monitor takes the stacks and
    looks into `/proc` for what the workers do. That no batch comes is suspected; that a worker died
    is proven: torch's own error says so.

    ## Why it hurts
    A worker that is stuck (a lock held when the process was forked, a file system that does not
    answer) never delivers; the other ranks wait in a collective, and torch waits without a limit.

    ## How to fix it
    Start workers with `multiprocessing_context="forkserver"`, start no threads before the loader,
    open files inside the worker, and give the loader a `timeout=` so that it says so itself.

    ## When it stays quiet
    A slow first batch that comes; data that is merely slow.
    """

    code = "DDP608"
    name = "data-stall"
    family = "hang"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(LoaderSeen) else "no DataLoader was seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        yield from self._died(run)
        now = scene(run)
        stuck = [s for s in missing(now) if s.phase is Phase.DATA]
        if not stuck and now.stall is not None and not now.blocked:
            stuck = [s for s in now.stands.values() if s.phase is Phase.DATA and not s.gone]
        if stuck and (now.stall is not None or overdue(run, now, stuck)):
            yield self._report(now, stuck)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check in ("rank-missing", "stall", "first-failure")

    def _died(self, run: Run) -> Iterable[Finding]:
        """A worker's process ended, and torch said so."""
        found = [
            f for f in failures(run) if f.exception and WORKER_DIED.search(f.exception.message)
        ]
        if not found:
            return
        first = found[0]
        loader = _loader(first.rank)
        message = first.exception.message if first.exception else ""
        # A signal tells of it, wherever the rank is just then.
        loop = first.rank.location(loader.loop_site) if loader else None
        noticed = first.location if loop is not None and first.location != loop else None
        ranks = tuple(sorted(f.rank.rank for f in found))
        yield self.finding(
            ranks=ranks,
            subjects=(loader.dataset,) if loader else (),
            location=loop or first.location,
            label="waits for that worker's batches",
            related=(Related("noticed here", noticed),) if noticed else (),
            summary=f"a DataLoader worker of {ranks_text(ranks)} died: {message.splitlines()[0]}",
            cause=_worker_end(message),
            fix="try `num_workers=0` to see an error of the data set itself; for lack of memory "
            "use fewer workers, for /dev/shm start the container with `--shm-size=8g`",
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
        where = (loop or first.location) if workers else (first.location or loop)
        here = next((s.made.location for s in waiting if s.made), None)
        others = sorted({s.rank.rank for s in waiting})
        who = f"{ranks_text(others)} {'waits' if len(others) == 1 else 'wait'}"
        waited, still = now.waited(stuck), max(s.still_s for s in stuck)
        verb = "waits" if len(ranks) == 1 else "wait"
        thread = thread_waits.failed(now, first)
        related = [*thread_waits.place(thread, first)]
        related += [Related(f"{who} here", here)] if here else []
        if loop is not None and loop != where:
            related.insert(0, Related("the loop over the loader", loop))
        return self.finding(
            ranks=ranks,
            confidence=Confidence.SUSPECTED,
            steps=first.steps,
            subjects=(loader.dataset,) if loader else (),
            location=where,
            label=f"no batch for {waited:.0f} s",
            related=tuple(related),
            summary=f"{ranks_text(ranks)} {verb} {waited:.0f} s for a batch; "
            + _workers_text(first.stood, loader),
            cause=_cause(first.stood, loader) + thread_waits.remark(thread),
            fix=NO_WORKERS if not workers else _fix(first.stood),
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
        return "it was killed from outside, most often for lack of memory"
    if "Bus error" in message:
        return "it ran out of shared memory (/dev/shm)"
    if "Segmentation" in message or "Aborted" in message:
        return "it crashed in native code"
    return "its process ended without a Python error: killed, out of shared memory, or `os._exit`"


def _loader(rank: Rank) -> LoaderSeen | None:
    return rank.latest(LoaderSeen)


def _workers(stood: RankStood | None) -> Evidence:
    rows = [
        {"pid": w.pid, "state": w.state, "cpu_s": w.cpu_s, "waits_in": w.waits_in}
        for w in (stood.workers if stood else ())
    ]
    return {"workers": rows}


def _workers_text(stood: RankStood | None, loader: LoaderSeen | None) -> str:
    if stood is None:
        return "what its workers do was not seen"
    if not loader or not loader.workers:
        return "it has no workers: the data set itself does not return"
    alive = [w for w in stood.workers if w.state not in ("Z", "X")]
    lost = loader.workers - len(alive)
    if lost > 0:
        return f"{lost} of its {loader.workers} workers are gone"
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


def _cause(stood: RankStood | None, loader: LoaderSeen | None) -> str:
    if stood is None or not loader or not loader.workers:
        return "the code that makes the batch does not return"
    if any(w.state == "T" for w in stood.workers):
        return "a worker was stopped by a signal"
    if any("futex" in w.waits_in for w in stood.workers):
        return (
            "a worker waits for a lock: typically one that another thread held when the worker "
            "was forked"
        )
    if _sleeps(stood):
        return f"a worker sleeps, as `time.sleep` does, in the code that loads {loader.dataset}"
    if _locked(stood):
        return (
            f"{_on_lock(stood)} for a lock on a file (`flock`, `lockf`), which another process "
            "holds, or a worker itself by a file that it keeps open"
        )
    return "the workers do not deliver the next batch"


def _fix(stood: RankStood | None) -> str:
    """What to do about workers that deliver nothing."""
    if _sleeps(stood):
        return SLEEPS
    return LOCKED if _locked(stood) else WORKERS


def _locked(stood: RankStood | None) -> bool:
    """Whether workers wait for a lock on a file, and none computes."""
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
    """Whether a worker waits for nothing but for time to pass."""
    return stood is not None and any("nanosleep" in w.waits_in for w in stood.workers)
