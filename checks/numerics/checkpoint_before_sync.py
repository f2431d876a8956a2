"""DDP803."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
from ddpdoctor.report.findings import Check, Confidence, Finding, FixKind, Related, Severity
from ddpdoctor.run import Run, fold_ranks, shorten

_ABSENT = "FileNotFoundError"
_TORN = re.compile(
    r"EOFError|unexpected EOF|pickle data was truncated|invalid load key|PytorchStreamReader"
    r"|Unsupported operand (80|0)\b|persistent id instruction|unpack requires a buffer"
    r"|JSONDecodeError|BadZipFile|SafetensorError|EOF: reading array|cannot reshape array"
    r"|^OSError: \[Errno 22\]"
)
"""What readers of checkpoints, arrays and settings say of half a file. The first byte of an archive
is 80, which means a persistent id to those that read fewer than four bytes and take it for a
pickle; 0 is what is not written yet. Of an archive without its end, places before its begin are
looked for."""


class CheckpointBeforeSync(Check):
    """A file is read while another rank may still be writing it

    ## What it finds
    One rank writes a file, another one reads it, and nothing made the reader wait: no collective
    of theirs stands between the two. It is found also in runs where the reader was lucky.

    ## How it knows
    Each rank records the files that it writes anew and, of the kinds that runs produce, those that
    it reads, with the counts of its groups' collectives before and after. Where no count of a group
    that both ranks are in went up between the write and the read, nothing ordered them, whatever
    the clock says. The finding is proven where the read began before the write was over, or failed
    as on a file that is not there yet or half written, by what `torch.load` raised or what the rank
    then ended with; else suspected. Of a file that the program opens itself only that moment is
    known: neither when the writing was over, nor what the reading raised where that was caught.

    ## Why it hurts
    The reader finds no file, half a file, or - worst - the one from the run before, and trains on
    with other weights than the rest. Where a rank ended with it, it is an error.

    ## How to fix it
    `dist.barrier()` on all ranks after the write and before the read.

    ## When it stays quiet
    A barrier or any other collective in between; a key of a store, or another file that a loop asks
    for, that the reader waited for before it found the file whole; a file that both lock; files
    that were there before, and are overwritten only after another collective; a rank that reads
    what it wrote itself; files that appear whole by a rename, where they were found, but for those
    that took the place of one that had been there since an earlier collective of both.
    """

    code = "DDP803"
    name = "checkpoint-before-sync"
    family = "numerics"
    severity = Severity.WARNING

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(FileWritten) else "no rank was seen to write a file"

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

    def explains(self, mine: Finding, other: Finding) -> bool:
        if not mine.evidence.get("the rank ended with it") or other.at < mine.at:
            return False
        if other.check == "first-failure":
            return bool(set(mine.ranks) & set(other.ranks))
        return other.code.startswith("DDP6")

    def _report(self, run: Run, pairs: list[tuple[Touch, Touch]]) -> Finding:
        # The one that failed tells the story best.
        write, read = max(pairs, key=lambda pair: bool(_failure(*pair)))
        path = shorten(read.event.path, read.rank.cwd)
        ranks = sorted({r.rank.rank for _, r in pairs})
        failed = _failure(write, read)
        overlap = read.began < write.ended
        saved = write.location
        who = f"ranks {fold_ranks(ranks)} read" if len(ranks) > 1 else f"rank {ranks[0]} reads"
        return self.finding(
            ranks=tuple(ranks),
            steps=steps_of(r for _, r in pairs),
            subjects=tuple(dict.fromkeys(shorten(r.event.path, r.rank.cwd) for _, r in pairs)),
            location=read.location,
            confidence=Confidence.PROVEN if failed or overlap else Confidence.SUSPECTED,
            label=f"nothing was seen that makes it wait for rank {write.rank.rank}",
            related=(
                *called(run, [read]),
                *((Related(f"rank {write.rank.rank} writes it here", saved),) if saved else ()),
                *called(run, [write]),
            ),
            summary=(
                f"{who} {path} without waiting for rank "
                f"{write.rank.rank}, which writes it" + (" - and failed" if failed else "")
            ),
            cause="no barrier or other collective stands between the write and the read",
            fix="`dist.barrier()` on all ranks between the write and the read",
            fix_kind=FixKind.CHECK,
            evidence={
                "write began": 0.0,
                **_end_of(write),
                "read began": round(read.began - write.began, 4),
                **({"the read failed with": failed} if failed else {}),
                **({"the rank ended with it": True} if failed and _ended_with(read) else {}),
            },
            at=read.began,
        )


def _end_of(write: Touch) -> dict[str, float | None]:
    if write.cut_off:
        return {"write ended": None}
    known = bool(write.event.ended)
    return {"write ended": round(write.ended - write.began, 4)} if known else {}


def _failure(write: Touch, read: Touch) -> str:
    """What the read failed with, where that is what the write explains: the file was not there yet,
    or half of it."""
    text = getattr(read.event, "failed", "") or _ended_with(read)
    over = write.rank.node == read.rank.node and read.began >= write.ended
    if text.startswith(_ABSENT):
        return "" if over else text
    return text if _TORN.search(text) and not (over and write.event.ended) else ""


def _ended_with(read: Touch) -> str:
    """The exception that ended the rank, where it came out of the function that reads, after it had
    read nothing else, and speaks of a file."""
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
    """Whether both asked for a lock on one file before."""
    return any(
        write.rank.rank in asked and asked.get(read.rank.rank, read.began + 1) <= read.began
        for asked in locks.values()
    )


def _unordered(read: Touch, touches: list[Touch]) -> Touch | None:
    """A write by another rank that this read did not wait for."""
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
    """Whether what was renamed took the place of an earlier one that both had met since, so that
    the read might have found that one: it neither waited for the file nor asked again."""
    before = [t for t in touches if t.rank is write.rank and t.began < write.began]
    again = [
        e
        for e in read.rank.of(FileRead)
        if e.path == read.event.path and e.marks == read.event.marks
    ]
    awaited = getattr(read.event, "awaited", True)
    return not awaited and len(again) == 1 and any(met(t, read) for t in before)
