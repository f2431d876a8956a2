"""DDP802: several ranks write the same file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from errno import ENOTEMPTY
from itertools import combinations
from typing import ClassVar

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
from ddpdoctor.events import ExceptionRaised, FileRead, FileRemoved, FileWritten, GroupReady
from ddpdoctor.report.declarations import Condition, Effect, When, seen
from ddpdoctor.report.errors import ErrorKind
from ddpdoctor.report.evidence_names import MESSAGE
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import (
    Location,
    Rank,
    Run,
    counted,
    fold_ranks,
    listed,
    ranks_do,
    ranks_text,
    shorten,
)

ELSEWHERE_AT_MOST = 8
WRITES_AT_MOST = 8

PREPARED = "prepared-before-training"
LOG = "log-file"
PARTS = "model-parts"
RENAMED = "renamed-file"
FOLDER = "moved-folder"
SAME_FILE = "same-file"

_SEVERITIES = {PREPARED: Severity.NOTE, LOG: Severity.WARNING}
"""The rules that are no error: a torn log file does little harm, and what ranks prepare for
themselves is most often equal."""

_LOGS = (".log", ".out", ".err")
_QUOTED = re.compile("'([^']+)'")
_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")


def _taken_away(mine: Finding, other: Finding) -> bool:
    """Whether a rank failed at one of the lines of `mine` because another rank had renamed or
    created what they race for."""
    message = str(other.evidence.get(MESSAGE, ""))
    kinds = {*other.subjects}
    if not (kinds & {"FileNotFoundError", "FileExistsError"} or _occupied(kinds, message)):
        return False
    if other.at < mine.at:
        return False
    spots = [mine.location, *(r.location for r in mine.related)]
    here = other.location
    if here is None or (here.file, here.line) not in [(s.file, s.line) for s in spots if s]:
        return False
    paths = [f"/{path.removeprefix('./')}" for path in _QUOTED.findall(message)]
    files = (f"/{file.removeprefix('/')}" for file in mine.subjects)
    return {*other.ranks} <= {*mine.ranks} and any(p.endswith(f) for f in files for p in paths)


def _occupied(kinds: set[str], message: str) -> bool:
    """Whether an exception says that a folder was moved to one that holds files."""
    return "OSError" in kinds and f"[Errno {ENOTEMPTY}]" in message


class CheckpointRace(Check):
    """Several ranks write the same file

    ## What it finds
    A path that several ranks write without waiting for each other: by `torch.save` or safetensors,
    by `open(..., "w")` and everything built on it (`Path.write_text`, numpy, pickle, `json.dump`),
    or by a temporary file that is renamed to the path. Likewise a path to which several ranks move
    a folder (`os.rename`, `os.replace`, `os.renames`, `shutil.move`).

    ## How it knows
    Python's audit events show every file that is opened for writing from scratch, and all that is
    renamed. Each
    rank records these writes (for its first 400 paths; of each the first six, then at powers of
    two) with the counts of its groups' collectives before and after. Two writes are ordered if the
    count of a group of both ranks has gone up in between; the clock is not compared. The finding is
    proven.

    ## Why it hurts
    The ranks overwrite each other half-way: the file is corrupt, or holds the state of another rank
    than the file beside it. That shows only when it is loaded, days later. Of folders that are
    moved to one path the first arrives; the other ranks fail ("Directory not empty"), or
    `shutil.move` puts their folders inside of it.

    ## How to fix it
    Write on one rank (`if dist.get_rank() == 0:`) and let the others wait (`dist.barrier()`), or
    give each rank its own file (`f"state-{rank}.pt"`). If the ranks hold different parts of a model
    (shards, stages, experts), only the latter keeps them all. For a folder: let all ranks write
    into one staging folder, wait (`dist.barrier()`), and move it on one rank.

    ## When it stays quiet
    - a file per rank, and ranks that take turns around a barrier
    - appending, exclusive creation, files under a file lock, temporary files
    - files that all ranks only truncate
    - the same path on local disks of different machines
    - distributed checkpoints, and caches of libraries
    - settings that a library records by itself before there is a process group, and that no rank
      reads

    For log files it is a warning. For files that are renamed into place before the first step (a
    cache of the data) it is a note, and so it is for folders if no rank failed at the move or
    removed the target: then the program handles the error, and only one rank's folder is kept.
    """

    code = "DDP802"
    name = "checkpoint-race"
    family = "numerics"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        PREPARED: "all ranks rename equal files into place before the first step",
        LOG: "all ranks write one log file",
        PARTS: "ranks save different parts of a model to one file",
        RENAMED: "ranks rename their files to one path",
        FOLDER: "ranks move folders to one path",
        SAME_FILE: "ranks write one file without waiting for each other",
    }
    requires = (seen(FileWritten, otherwise="no rank was seen to write a file"),)
    effects = (
        Effect(("checkpoint-before-sync",), when=(When.SHARED_SUBJECT,)),
        Effect(("first-failure",), errors=(ErrorKind.BROKEN_FILE,)),
        Effect(
            ("first-failure",),
            when=(Condition("at a file that another rank took away", _taken_away),),
        ),
    )

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

    def _report(self, run: Run, files: list[list[Touch]]) -> Finding:
        first = files[0][0]
        paths = [_name(touches[0]) for touches in files]
        ranks = _ranks(files[0])
        also = {(s.file, s.line): s for touches in files[1:] if (s := touches[0].location)}
        elsewhere = [spot for spot in also.values() if spot != first.location]
        rule = _rule(files, paths, parts=hold_parts(run))
        failed = _failed(files) if rule == FOLDER else None
        severity = _SEVERITIES.get(rule, self.severity)
        if rule == FOLDER and failed is None and not _replaced(files) and not _nested(files):
            severity = Severity.NOTE
        others = len(paths) - 1
        steps = steps_of(t for touches in files for t in touches)
        more = f" and {counted(others, 'more file')}" if others else ""
        return self.finding(
            rule=rule,
            severity=severity,
            ranks=tuple(ranks),
            steps=steps,
            subjects=tuple(paths),
            location=first.location,
            label=f"runs on {ranks_text(ranks)}",
            related=(
                *called(run, files[0]),
                *(Related("also here", spot) for spot in elsewhere[:ELSEWHERE_AT_MOST]),
            ),
            summary=f"{_do(rule, ranks)} {paths[0]}{more} without waiting for each other",
            cause=_cause(files) if rule != FOLDER else _cause_of_moves(files, failed),
            fix=_fix(rule, files[0]),
            fix_kind=FixKind.TEMPLATE,
            evidence={
                "files": [_row(touches) for touches in files[:10]],
                "writes": [_write(t, _early(files, steps)) for t in files[0][:WRITES_AT_MOST]],
                **({"writes in all": count} if (count := len(files[0])) > WRITES_AT_MOST else {}),
            },
            at=first.began,
        )


def _racing(touches: list[Touch]) -> list[Touch]:
    """The writes that are not ordered with one of another rank, by step and rank."""
    free = [t for t in touches if not (isinstance(t.event, FileWritten) and t.event.locked)]
    racing: dict[int, Touch] = {}
    for a, b in combinations(free, 2):
        together = (_clears(a) and _clears(b)) or a.event.how == b.event.how == "into"
        if a.rank.rank != b.rank.rank and not together and not ordered(a, b):
            racing[id(a)], racing[id(b)] = a, b
    return sorted(racing.values(), key=lambda t: (t.event.step, t.rank.rank))


def _clears(touch: Touch) -> bool:
    """Whether a write leaves the file empty. Several of these do not conflict."""
    return isinstance(touch.event, FileWritten) and touch.event.empty


def _in_one_go(places: list[list[list[Touch]]]) -> list[list[list[Touch]]]:
    """Racing writes by place, with some places joined: those of one function where the same ranks
    write one after the other without a collective in between. They lack the same guard, so they are
    one fault."""
    reported: list[list[list[Touch]]] = []
    for files in places:
        same = next((t for t in reported if _follow(t[-1], files[0])), None)
        if same is None:
            reported.append(list(files))
        else:
            same.extend(files)
    return reported


def _follow(old: list[Touch], new: list[Touch]) -> bool:
    """Whether the writes `new` follow `old` in the same function and step and on the same ranks,
    with no collective in between."""

    def state(touch: Touch, marks: dict[str, int]) -> tuple[object, ...]:
        where = touch.location
        place = (where.file, where.function) if where else None
        return touch.rank.rank, touch.event.step, place, sorted(marks.items())

    left = [state(t, t.event.marks_after) for t in old if t.location]
    return _ranks(old) == _ranks(new) and any(state(t, t.event.marks) in left for t in new)


def _ranks(touches: list[Touch]) -> list[int]:
    return sorted({t.rank.rank for t in touches})


def _notes_settings(touch: Touch) -> bool:
    """Whether a write is a library's record of how the program was started: a settings file,
    written before there is a process group."""
    event = touch.event
    by_library = isinstance(event, FileWritten) and bool(event.library)
    return by_library and not event.marks and event.path.endswith(_SETTINGS)


def _whole(files: list[list[Touch]]) -> bool:
    """Whether the files are renamed to these paths, so that they are never half written."""
    return all(t.event.how == "rename" for touches in files for t in touches)


def _publishes(files: list[list[Touch]]) -> bool:
    """Whether files are renamed into place before the first step: what each rank prepares for
    itself is most often equal (a vocabulary, a cache of the data)."""
    return _whole(files) and not any(t.event.step > 0 for touches in files for t in touches)


def _name(touch: Touch) -> str:
    return shorten(touch.event.path, touch.rank.cwd)


def _rule(files: list[list[Touch]], paths: list[str], *, parts: bool) -> str:
    """The rule for the racing writes of `files`; `parts`: ranks hold different parts of a model."""
    if any(_is_tree(t) for touches in files for t in touches):
        return FOLDER
    if _publishes(files):
        return PREPARED
    if all(path.endswith(_LOGS) for path in paths):
        return LOG
    if parts and files[0][0].event.how == "save":
        return PARTS
    return RENAMED if _whole(files) else SAME_FILE


def _cause(files: list[list[Touch]]) -> str:
    written = [{(s.file, s.line) for t in touches if (s := t.location)} for touches in files]
    lines = sorted(set().union(*written))
    if len(lines) == 1:
        where = "this line runs on each of these ranks"
    elif all(len(here) == 1 for here in written):
        where = "each of these lines runs on each of these ranks"
    elif lines:
        where = f"they write it at {listed([f'{file}:{line}' for file, line in lines])}"
    else:
        where = "each of these ranks writes it"
    if _whole(files):
        return f"{where}; each rename is atomic, but which rank's file remains is random"
    return f"{where}, and there is no collective between the writes"


def _is_tree(touch: Touch) -> bool:
    return isinstance(touch.event, FileWritten) and touch.event.tree


def _failed(files: list[list[Touch]]) -> tuple[Rank, ExceptionRaised] | None:
    """The exception that ended a rank at one of these moves."""
    for touch in (t for touches in files for t in touches):
        for error in touch.rank.of(ExceptionRaised):
            paths = [path.removeprefix("./") for path in _QUOTED.findall(error.message)]
            named = any(touch.event.path.endswith(f"/{path.lstrip('/')}") for path in paths if path)
            if error.at >= touch.event.at and named and not error.caught:
                return touch.rank, error
    return None


def _replaced(files: list[list[Touch]]) -> bool:
    """Whether a rank has removed what another rank had moved there."""
    every = [t for touches in files for t in touches]
    return any(
        gone.path == kept.event.path
        and kept.rank is not rank
        and kept.rank.node == rank.node
        and rank.wall(gone.at) >= kept.began
        for kept in every
        for rank in {t.rank.rank: t.rank for t in every}.values()
        for gone in rank.of(FileRemoved)
    )


def _nested(files: list[list[Touch]]) -> bool:
    """Whether a folder was moved into the one that another rank had moved there."""
    return any(t.event.how == "into" for touches in files for t in touches)


def _do(rule: str, ranks: list[int]) -> str:
    return f"{ranks_do(ranks, 'move')} a folder to" if rule == FOLDER else ranks_do(ranks, "write")


def _cause_of_moves(files: list[list[Touch]], failed: tuple[Rank, ExceptionRaised] | None) -> str:
    if failed is not None:
        rank, error = failed
        then = f"the first of them succeeds, then {ranks_text([rank.rank])} raised {error.kind}"
    elif _nested(files):
        then = "the first of them makes the folder, `shutil.move` puts the others inside of it"
    elif _replaced(files):
        then = "a rank removes what another has moved there, and which folder remains is random"
    else:
        then = "the first of them succeeds, and what the other ranks have written is not kept"
    return f"there is no collective between the moves: {then}"


def _fix(rule: str, touches: list[Touch]) -> str:
    if rule == FOLDER:
        return (
            "write into one staging folder on all ranks, call `dist.barrier()`, move it on one "
            "rank (`if dist.get_rank() == 0: ...`), and call `dist.barrier()` again; or include "
            "the rank in the name of the target"
        )
    if rule == PARTS:
        name = touches[0].event.path.rpartition("/")[2]
        own = re.sub(r"(\.\w+|)$", r"-{dist.get_rank()}\1", name, count=1)
        return (
            "include the rank in the file name, since each rank holds different parameters: "
            f'`f"{own}"`; or use `torch.distributed.checkpoint`, which writes all parts'
        )
    form = "call `init_process_group` before, " if _before_the_group(touches) else ""
    return (
        f"{form}write on one rank (`if dist.get_rank() == 0: ...`), then call `dist.barrier()` on "
        "all ranks (outside of any `if` that skips the write, such as that the file exists); if "
        "each rank writes different data (a shard), include the rank in the file name, or use "
        "`torch.distributed.checkpoint`"
    )


def _before_the_group(touches: list[Touch]) -> bool:
    """Whether the ranks write before they form a process group: they do not know their ranks by
    it, and cannot wait for each other."""
    formed = [(t, t.rank.first(GroupReady)) for t in touches]
    return all(ready is not None and t.event.at < ready.at for t, ready in formed)


def _row(touches: list[Touch]) -> dict[str, object]:
    return {
        "file": _name(touches[0]),
        "ranks": fold_ranks(t.rank.rank for t in touches),
        "times": max(getattr(t.event, "times", 1) for t in touches),
    }


def _early(files: list[list[Touch]], steps: Steps | None) -> int:
    """By how much the reported steps are lower than the number of steps before a write (see
    `Steps.of`)."""
    last = max(t.event.step for touches in files for t in touches)
    return last - steps.last if steps else 0


def _write(touch: Touch, early: int) -> dict[str, object]:
    place: Location | None = touch.location
    return {
        "rank": touch.rank.rank,
        "step": max(0, touch.event.step - early),
        "how": touch.event.how,
        "line": str(place) if place else "",
        "collectives before": sum(touch.event.marks.values()),
        "seconds": round(touch.ended - touch.began, 4) if touch.event.ended else None,
    }
