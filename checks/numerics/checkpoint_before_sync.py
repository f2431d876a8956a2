"""DDP803: a file is read while another rank may still write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.process.shared_files import (
    Touch,
    called,
    key,
    locked,
    met,
    ordered,
    steps_of,
    writes,
)
from ddpdoctor.events import FileRead, FileWritten
from ddpdoctor.report.declarations import CALLS, WAITING, Effect, When, seen
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import Run, ranks_do, shorten

_ABSENT = "FileNotFoundError"
_TORN = re.compile(
    r"EOFError|unexpected EOF|pickle data was truncated|invalid load key|PytorchStreamReader"
    r"|Unsupported operand (80|0)\b|persistent id instruction|unpack requires a buffer"
    r"|JSONDecodeError|BadZipFile|SafetensorError|EOF: reading array|cannot reshape array"
    r"|^OSError: \[Errno 22\]"
)
"""What readers of checkpoints, arrays and settings raise on a half-written file.

The first byte of a zip archive is 80, the pickle opcode of a persistent id: a reader that gets less
than four bytes takes the archive for a pickle. Byte 0 is what is not written yet. `Errno 22`: the
directory of an archive without its end seems to lie before its begin."""

ENDED_RANK = "failed-read-ended-rank"
FAILED = "failed-read"
OVERLAP = "read-during-write"
UNORDERED = "no-collective-between"


class CheckpointBeforeSync(Check):
    """A file is read while another rank may still be writing it

    ## What it finds
    One rank writes a file, another one reads it, and no collective of both lies in between, so
    nothing makes the reader wait. It is also found in runs in which the read happens to succeed.

    ## How it knows
    Each rank records the files that it writes from scratch and those that it reads (of the kinds
    that runs produce), with the counts of its groups' collectives before and after. If the count of
    no group of both ranks has gone up between write and read, nothing orders them, whatever the
    clock says.

    The finding is proven if the read began before the write ended, or if it failed as on a missing
    or half-written file (by what `torch.load` raised, or the exception that ended the rank). Else
    it is suspected. Of a file that the program opens itself only the moment of opening is known:
    neither when the write ended, nor what a failed read raised if that was caught.

    ## Why it hurts
    The reader finds no file, half a file or, worst, the file of the last run, and continues with
    other weights than the other ranks.

    ## How to fix it
    Call `dist.barrier()` on all ranks after the write and before the read.

    ## When it stays quiet
    - a barrier or another collective in between
    - a reader that first waited for a key of a store, or polled another file, and then found the
      file complete
    - a file that both ranks lock
    - files that existed before and are overwritten only after another collective
    - a rank that reads what it wrote itself
    - files that appear complete by a rename and were found (unless the rename replaced a file from
      before an earlier collective of both)
    """

    code = "DDP803"
    name = "checkpoint-before-sync"
    family = "numerics"
    severity = Severity.WARNING
    rules: ClassVar[Mapping[str, str]] = {
        ENDED_RANK: "the read failed, and its exception ended the rank",
        FAILED: "the read failed as on a missing or half-written file",
        OVERLAP: "the read began before the write ended",
        UNORDERED: "no collective orders write and read; this time it went well",
    }
    requires = (seen(FileWritten, otherwise="no rank was seen to write a file"),)
    effects = (
        Effect(("first-failure",), of=(ENDED_RANK,), when=(When.NOT_BEFORE, When.SHARED_RANK)),
        Effect((*WAITING, *CALLS, "rank-died"), of=(ENDED_RANK,), when=(When.NOT_BEFORE,)),
    )

    def examine(self, run: Run) -> Iterable[Finding]:
        written = writes(run)
        locks = locked(run)
        by_place: dict[object, list[tuple[Touch, Touch]]] = {}
        for rank in run.ranks.values():
            for event in rank.of(FileRead):
                read = Touch(rank, event)
                write = _unordered(read, written.get(key(rank, event), []))
                if write is not None and not _take_turns(locks, write, read):
                    where = read.location
                    place = (where.file, where.line) if where else None
                    by_place.setdefault(place, []).append((write, read))
        for pairs in by_place.values():
            yield self._report(run, pairs)

    def _report(self, run: Run, pairs: list[tuple[Touch, Touch]]) -> Finding:
        # Of several reads at one line, one that failed shows the fault best.
        write, read = max(pairs, key=lambda pair: bool(_failure(*pair)))
        path = shorten(read.event.path, read.rank.cwd)
        ranks = sorted({r.rank.rank for _, r in pairs})
        failed = _failure(write, read)
        rule = _rule(write, read, failed)
        saved = write.location
        writer = f"rank {write.rank.rank}"
        return self.finding(
            rule=rule,
            ranks=tuple(ranks),
            steps=steps_of(r for _, r in pairs),
            subjects=tuple(dict.fromkeys(shorten(r.event.path, r.rank.cwd) for _, r in pairs)),
            location=read.location,
            confidence=Confidence.SUSPECTED if rule == UNORDERED else Confidence.PROVEN,
            label=f"does not wait for {writer}",
            related=(
                *called(run, [read]),
                *((Related(f"{writer} writes it here", saved),) if saved else ()),
                *called(run, [write]),
            ),
            summary=f"{ranks_do(ranks, 'read')} {path} without waiting for {writer}, which writes "
            "it" + (", and the read failed" if failed else ""),
            cause="there is no barrier or other collective between the write and the read",
            fix=_fix(write),
            fix_kind=FixKind.CHECK,
            evidence={
                "write began": 0.0,
                **_end_of(write),
                "read began": round(read.began - write.began, 4),
                **({"the read failed with": failed} if failed else {}),
                **({"the exception ended the rank": True} if rule == ENDED_RANK else {}),
            },
            at=read.began,
        )


def _fix(write: Touch) -> str:
    if isinstance(write.event, FileWritten) and write.event.in_thread:
        return (
            f"wait on rank {write.rank.rank} until the thread has written the file "
            "(`future.result()`, `thread.join()`), then call `dist.barrier()` on all ranks, before "
            "the read"
        )
    return "call `dist.barrier()` on all ranks between the write and the read"


def _rule(write: Touch, read: Touch, failed: str) -> str:
    if failed:
        return ENDED_RANK if _ended_with(read) else FAILED
    return OVERLAP if read.began < write.ended else UNORDERED


def _end_of(write: Touch) -> dict[str, float | None]:
    if write.cut_off:
        return {"write ended": None}
    known = bool(write.event.ended)
    return {"write ended": round(write.ended - write.began, 4)} if known else {}


def _failure(write: Touch, read: Touch) -> str:
    """What a read failed with, if an unfinished write explains it: the file was missing or only
    half written. Empty otherwise."""
    text = getattr(read.event, "failed", "") or _ended_with(read)
    over = write.rank.node == read.rank.node and read.began >= write.ended
    if text.startswith(_ABSENT):
        return "" if over else text
    return text if _TORN.search(text) and not (over and write.event.ended) else ""


def _ended_with(read: Touch) -> str:
    """The exception that ended the reading rank, if it left the function that reads, the rank had
    read nothing else since, and its text is about a file; empty otherwise."""
    raised, where, rank = read.rank.exception, read.location, read.rank
    if raised is None or where is None or raised.relayed is not None:
        return ""
    before = [e for e in rank.of(FileRead) if e.at <= raised.at]
    if not before or before[-1] is not read.event:
        return ""
    spots = {(shorten(f.file, rank.cwd), f.function) for f in raised.frames if f.user}
    text = f"{raised.kind}: {raised.message}"[:1000]
    if text.startswith(_ABSENT):
        return text if read.event.path.rpartition("/")[2] in raised.message else ""
    return text if (where.file, where.function) in spots and _TORN.search(text) else ""


def _take_turns(locks: dict[tuple[str, str], dict[int, float]], write: Touch, read: Touch) -> bool:
    """Whether writer and reader both locked one file before, so that they exclude each other."""
    return any(
        write.rank.rank in asked and asked.get(read.rank.rank, read.began + 1) <= read.began
        for asked in locks.values()
    )


def _unordered(read: Touch, touches: list[Touch]) -> Touch | None:
    """The write of another rank that a read did not wait for; None where there is none."""
    if any(t.rank.rank == read.rank.rank and t.began <= read.began for t in touches):
        return None  # it reads what it wrote itself; who else writes it is a race of writers
    for write in touches:
        if write.rank.rank == read.rank.rank or ordered(write, read):
            continue
        whole = write.event.how == "rename" and read.began >= write.began
        if whole and not _failure(write, read) and not _replaced(write, read, touches):
            continue
        stored = getattr(read.event, "stored", 0.0)
        if stored and read.rank.wall(stored) >= write.ended:
            continue  # it waited for a key that may well say that the file is there
        polled = getattr(read.event, "polled", False)
        if polled and read.began >= write.ended and not _failure(write, read):
            continue  # or for another file that does
        return write
    return None


def _replaced(write: Touch, read: Touch, touches: list[Touch]) -> bool:
    """Whether a renamed file replaced one from before a collective of both ranks, so that the read
    might have found the old one: the reader neither waited for the file nor read it again."""
    before = [t for t in touches if t.rank is write.rank and t.began < write.began]
    again = [
        e
        for e in read.rank.of(FileRead)
        if e.path == read.event.path and e.marks == read.event.marks
    ]
    awaited = getattr(read.event, "awaited", True)
    return not awaited and len(again) == 1 and any(met(t, read) for t in before)
