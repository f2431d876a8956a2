"""DDP802."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

from ddpdoctor.analysis.process.shared_files import (
    Touch,
    called,
    hold_parts,
    key,
    locked,
    ordered,
    steps_of,
    writes,
)
from ddpdoctor.events import FileRead, FileWritten
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Location, Run, fold_ranks, shorten

ELSEWHERE_AT_MOST = 8
WRITES_AT_MOST = 8

_LOGS = (".log", ".out", ".err")
_QUOTED = re.compile("'([^']+)'")
_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")


class CheckpointRace(Check):
    """Several ranks write the same file

    ## What it finds
    One path that several ranks write, with nothing that makes one wait for the other: by
    `torch.save` or safetensors, by `open(..., "w")` and everything built on it (`Path.write_text`,
    numpy, pickle, `json.dump`), or by a temporary file that is renamed onto the path.

    ## How it knows
    Python's own audit events show every file that is opened to be written anew, or renamed. Each
    rank records these writes (of its first 400 paths; of each the first six, then at powers of
    two), with the counts of its groups' collectives before and after. Two ranks have met where the
    count of a group that both are in went up between their writes: that is compared, not the clock.
    The finding is proven.

    ## Why it hurts
    The writers overwrite each other in the middle: the file is torn, or holds another rank's state
    than the one beside it, and that is found when it is loaded, days later.

    ## How to fix it
    Let one rank write (`if dist.get_rank() == 0:`) and the others wait (`dist.barrier()`), or give
    each rank a file of its own (`f"state-{rank}.pt"`). Where ranks hold different parts of a model
    (shards, stages, experts), only the latter keeps them all.

    ## When it stays quiet
    A file per rank; ranks that take turns around a barrier; appending; files opened exclusively or
    under a file lock; temporary files; files that all ranks only clear; the same path on another
    machine's own disk; distributed checkpoints; caches of libraries; settings that a library notes
    down by itself before there is a process group, and that nobody reads. For log files it is a
    warning, for what is renamed whole before the first step (a cache of the data) a note.
    """

    code = "DDP802"
    name = "checkpoint-race"
    family = "numerics"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(FileWritten) else "no rank was seen to write a file"

    def examine(self, run: Run) -> Iterable[Finding]:
        by_place: dict[object, list[list[Touch]]] = {}
        locks = locked(run)
        read = {key(rank, event) for rank in run.ranks.values() for event in rank.of(FileRead)}
        for file, touches in writes(run).items():
            racing = _racing(touches) if file not in locks else []
            if racing and not (file not in read and all(map(_notes_settings, touches))):
                where = racing[0].location
                place = (where.file, where.line) if where else None
                by_place.setdefault(place, []).append(racing)
        for files in _in_one_go(list(by_place.values())):
            yield self._report(run, files)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check == "checkpoint-before-sync":
            return bool(set(mine.subjects) & set(other.subjects))
        message = str(other.evidence.get("message", ""))
        torn = ("PytorchStreamReader", "EOFError", "invalid load key", "Ran out of input")
        if other.check != "first-failure":
            return False
        return any(text in message for text in torn) or _taken_away(mine, other, message)

    def _report(self, run: Run, files: list[list[Touch]]) -> Finding:
        first = files[0][0]
        paths = [_name(touches[0]) for touches in files]
        ranks = _ranks(files[0])
        also = {(s.file, s.line): s for touches in files[1:] if (s := touches[0].location)}
        elsewhere = [spot for spot in also.values() if spot != first.location]
        logs = all(path.endswith(_LOGS) for path in paths)
        others = len(paths) - 1
        steps = steps_of(t for touches in files for t in touches)
        more = f" and {others} more file{'s' if others > 1 else ''}" if others else ""
        return self.finding(
            severity=Severity.NOTE
            if _publishes(files)
            else Severity.WARNING
            if logs
            else Severity.ERROR,
            ranks=tuple(ranks),
            steps=steps,
            subjects=tuple(paths),
            location=first.location,
            label=f"runs on ranks {fold_ranks(ranks)}",
            related=(
                *called(run, files[0]),
                *(Related("and here", spot) for spot in elsewhere[:ELSEWHERE_AT_MOST]),
            ),
            summary=f"ranks {fold_ranks(ranks)} write {paths[0]}{more}, none waiting for another",
            cause=_cause(files),
            fix=_fix(files[0], hold_parts(run)),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "files": [_row(touches) for touches in files[:10]],
                "writes": [_write(t, _early(files, steps)) for t in files[0][:WRITES_AT_MOST]],
                **({"writes in all": count} if (count := len(files[0])) > WRITES_AT_MOST else {}),
            },
            at=first.began,
        )


def _taken_away(mine: Finding, other: Finding, message: str) -> bool:
    """Whether a rank failed at one of these lines because a file that it races for was renamed or
    made by another."""
    if not {*other.subjects} & {"FileNotFoundError", "FileExistsError"} or other.at < mine.at:
        return False
    spots = [mine.location, *(r.location for r in mine.related)]
    here = other.location
    if here is None or (here.file, here.line) not in [(s.file, s.line) for s in spots if s]:
        return False
    paths = [f"/{path.removeprefix('./')}" for path in _QUOTED.findall(message)]
    files = (f"/{file.removeprefix('/')}" for file in mine.subjects)
    return {*other.ranks} <= {*mine.ranks} and any(p.endswith(f) for f in files for p in paths)


def _racing(touches: list[Touch]) -> list[Touch]:
    """The writes that race with one of another rank, oldest first."""
    free = [t for t in touches if not (isinstance(t.event, FileWritten) and t.event.locked)]
    racing: dict[int, Touch] = {}
    for a, b in combinations(free, 2):
        if a.rank.rank != b.rank.rank and not (_clears(a) and _clears(b)) and not ordered(a, b):
            racing[id(a)], racing[id(b)] = a, b
    return sorted(racing.values(), key=lambda t: (t.event.step, t.rank.rank))


def _clears(touch: Touch) -> bool:
    """Whether it leaves the file empty; after several of those it is, whoever comes last."""
    return isinstance(touch.event, FileWritten) and touch.event.empty


def _in_one_go(places: list[list[list[Touch]]]) -> list[list[list[Touch]]]:
    """The files of each place; places of one function where the same ranks write one after the
    other, with no collective between, lack the same guard and are one."""
    reported: list[list[list[Touch]]] = []
    for files in places:
        same = next((t for t in reported if _follow(t[-1], files[0])), None)
        if same is None:
            reported.append(list(files))
        else:
            same.extend(files)
    return reported


def _follow(old: list[Touch], new: list[Touch]) -> bool:
    def state(touch: Touch, marks: dict[str, int]) -> tuple[object, ...]:
        where = touch.location
        place = (where.file, where.function) if where else None
        return touch.rank.rank, touch.event.step, place, sorted(marks.items())

    left = [state(t, t.event.marks_after) for t in old if t.location]
    return _ranks(old) == _ranks(new) and any(state(t, t.event.marks) in left for t in new)


def _ranks(touches: list[Touch]) -> list[int]:
    return sorted({t.rank.rank for t in touches})


def _notes_settings(touch: Touch) -> bool:
    """A library's record of how the program was started, by its name and its time."""
    event = touch.event
    by_library = isinstance(event, FileWritten) and bool(event.library)
    return by_library and not event.marks and event.path.endswith(_SETTINGS)


def _whole(files: list[list[Touch]]) -> bool:
    """Whether nothing is ever half written: the files are renamed onto these paths."""
    return all(t.event.how == "rename" for touches in files for t in touches)


def _publishes(files: list[list[Touch]]) -> bool:
    """Whether that is before the first step: what each rank prepares for itself is most often the
    same (a vocabulary, a cache of the data)."""
    return _whole(files) and not any(t.event.step > 0 for touches in files for t in touches)


def _name(touch: Touch) -> str:
    return shorten(touch.event.path, touch.rank.cwd)


def _cause(files: list[list[Touch]]) -> str:
    written = [{(s.file, s.line) for t in touches if (s := t.location)} for touches in files]
    lines = sorted(set().union(*written))
    if len(lines) == 1:
        where = "the line runs on every one of them"
    elif all(len(here) == 1 for here in written):
        where = "each of these lines runs on every one of them"
    elif lines:
        where = f"they write it in {' and '.join(f'{file}:{line}' for file, line in lines)}"
    else:
        where = "every one of them writes it"
    if _whole(files):
        return f"{where}; each rename is whole, but which rank's file stays is left to chance"
    return f"{where}, and no collective stands between the writes"


def _fix(touches: list[Touch], parts: bool) -> str:
    if parts and touches[0].event.how == "save":
        name = touches[0].event.path.rpartition("/")[2]
        own = re.sub(r"(\.\w+|)$", r"-{dist.get_rank()}\1", name, count=1)
        return (
            "put the rank into the name, as each rank holds parameters of its own that are needed: "
            f'`f"{own}"`; or use `torch.distributed.checkpoint`, which writes all parts'
        )
    return (
        "write on one rank and let the others wait: `if dist.get_rank() == 0: ...` and then "
        "`dist.barrier()` on all ranks; where each rank has something of its own to write (a "
        "shard), put the rank into the name, or use `torch.distributed.checkpoint`"
    )


def _row(touches: list[Touch]) -> dict[str, object]:
    return {
        "file": _name(touches[0]),
        "ranks": fold_ranks(t.rank.rank for t in touches),
        "times": max(getattr(t.event, "times", 1) for t in touches),
    }


def _early(files: list[list[Touch]], steps: Steps | None) -> int:
    """How much less than the steps taken before a write the number is that its step is told by."""
    last = max(t.event.step for touches in files for t in touches)
    return last - steps.last if steps else 0


def _write(touch: Touch, early: int) -> dict[str, object]:
    place: Location | None = touch.location
    return {
        "rank": touch.rank.rank,
        "step": max(0, touch.event.step - early),
        "how": touch.event.how,
        "line": str(place) if place else "",
        "collectives before it": sum(touch.event.marks.values()),
        "seconds": round(touch.ended - touch.began, 4) if touch.event.ended else None,
    }
