"""Which of some files and folders are what a run left behind, and of which rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..run import ranks_text, some
from ..storage.flight_dumps import Dump, DumpError, read_dump
from .failures import (
    Raised,
    by_rank,
    error_file,
    exit_codes,
    last_traceback,
    root_causes,
    without_leads,
)
from .same_run import of_other_runs

MOST_FILES = 20_000
LONGEST_LOG = 64 << 20
"""Files looked at, and bytes read of a log: its end."""

_DUMP = re.compile(r"(?:trace|dump|flight).*?(\d+)(?:\.(?:json|pkl|pickle))?$", re.IGNORECASE)
_RANK_FOLDER = re.compile(r"\d+$")


@dataclass
class Leftovers:
    """What was found.

    Attributes:
        dumps, raised: by rank; codes: exit code of a rank, a signal as its negative number.
        started: ranks that have a log or an error file.
        ignored: files that looked like a part of it, and why they were not used.
        read: how many files were used.
    """

    dumps: dict[int, Dump] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    ignored: list[tuple[Path, str]] = field(default_factory=list)
    read: int = 0

    @property
    def anything(self) -> bool:
        return bool(self.dumps or self.raised or self.codes)

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.dumps, *self.raised, *self.codes, *self.started})

    def told(self) -> list[str]:
        """What was read, and what is not known, a sentence each."""
        dumps, raised = sorted(self.dumps), sorted(self.raised)
        said = []
        if dumps:
            said.append(f"flight-recorder dumps of {ranks_text(dumps)}")
        if raised:
            said.append(f"tracebacks of {ranks_text(raised)}")
        if self.codes:
            said.append(f"exit codes of {ranks_text(sorted(self.codes))}")
        lines = [f"read: {', '.join(said)}; this run was not examined by the doctor"]
        members = {r for d in self.dumps.values() for ranks in d.groups.values() for r in ranks}
        if dumps and (lacking := sorted(members - set(dumps))):
            they = "it was" if len(lacking) == 1 else "they were"
            lines.append(f"no dump of {ranks_text(lacking)}: where {they} is not known")
        lines += [f"not used: {path}: {why}" for path, why in self.ignored]
        return lines

    def why_nothing(self, paths: Sequence[Path]) -> str:
        """One line, where there is nothing to report on; empty where they are plain folders."""
        if self.ignored:
            said = [f"{path}: {why}" for path, why in self.ignored]
            return f"nothing to report on: {some(said, 3)}"
        if files := [str(path) for path in paths if not path.is_dir()]:
            return (
                f"{some(files)}: no record of a run, and nothing that a run leaves behind (a dump "
                "of the flight recorder, an error file, a log with the traceback of a rank)"
            )
        return ""


def is_run(path: Path) -> bool:
    """Whether a path is a run folder, or holds some."""
    if not path.is_dir():
        return (path.parent / "run.json").exists()
    return any(
        next(path.glob(pattern), None) for pattern in ("run.json", "rank-*.jsonl", "*/run.json")
    )


def search(paths: Sequence[Path]) -> Leftovers:
    """Look for dumps, error files and logs in files and folders."""
    found = Leftovers()
    files: dict[int, Path] = {}
    for path in paths:
        for file in _files(path, found):
            _look(found, file, files)
    for rank, why in of_other_runs(found.dumps).items():
        del found.dumps[rank]
        found.read -= 1
        found.ignored.append((files[rank], why))
    return found


def _files(path: Path, found: Leftovers) -> Iterator[Path]:
    if not path.is_dir():
        if path.exists():
            yield path
        return
    # The newest attempt of a launcher's log folder stands for the run.
    inside = list(_inside(path, found))
    attempts = {part for file in inside for part in file.parts if part.startswith("attempt_")}
    newest = max(attempts, default="")
    for file in inside[:MOST_FILES]:
        attempt = next((p for p in file.parts if p.startswith("attempt_")), "")
        if attempt in ("", newest):
            yield file


def _inside(path: Path, found: Leftovers) -> list[Path]:
    """The files in a folder; folders that may not be read are told."""

    def denied(error: OSError) -> None:
        place = Path(error.filename or path)
        found.ignored.append((place, f"it cannot be read ({error.strerror})"))

    return sorted(
        file
        for folder, _, names in os.walk(path, onerror=denied)
        for name in names
        if (file := Path(folder, name)).is_file()
    )


def _look(found: Leftovers, file: Path, files: dict[int, Path]) -> None:
    if not file.is_file():
        found.ignored.append((file, "it is no file to read"))
        return
    in_folder = file.parent.name if _RANK_FOLDER.match(file.parent.name) else ""
    rank = int(in_folder) if in_folder and "attempt_" in str(file) else -1
    if file.name == "error.json" or (file.suffix == ".json" and rank >= 0):
        _read_error(found, file, rank)
        return
    if numbered := _DUMP.search(file.name):
        number = int(numbered[1])
        try:
            dump = read_dump(file)
        except DumpError as error:
            found.ignored.append((file, str(error)))
            return
        if number in found.dumps:
            older = file if dump.last <= found.dumps[number].last else files[number]
            found.ignored.append((older, f"there is a later dump of rank {number}"))
            if older is file:
                return
            found.read -= 1
        found.dumps[number], files[number] = dump, file
        found.read += 1
        return
    if file.suffix in (".log", ".txt", ".err", ".out", ""):
        _read_log(found, file, rank)


def _read_error(found: Leftovers, file: Path, rank: int) -> None:
    try:
        raised = error_file(file)
    except OSError as error:
        found.ignored.append((file, f"it cannot be read ({error.strerror})"))
        return
    if raised is None:
        if file.name == "error.json":
            found.ignored.append((file, "it is cut short, or no error file of torchelastic"))
    elif rank < 0:
        found.ignored.append((file, "its folder does not tell the rank"))
    else:
        found.raised[rank] = raised
        found.started.add(rank)
        found.read += 1


def _read_log(found: Leftovers, file: Path, rank: int) -> None:
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - LONGEST_LOG))
            text = log.read().decode("utf-8", "replace")
        at = file.stat().st_mtime
    except OSError as error:
        found.ignored.append((file, f"it cannot be read ({error.strerror})"))
        return
    if rank >= 0:
        found.started.add(rank)
    plain = without_leads(text.splitlines())
    text = "\n".join(plain)
    for number, (code, _) in exit_codes(text).items():
        found.codes[number] = code
        found.started.add(number)
        found.read += 1
    for number, raised in root_causes(text):
        found.raised.setdefault(number, raised)
    lines: dict[int, list[str]] = {}
    for number, line in by_rank(plain, rank):
        lines.setdefault(number, []).append(line)
    for number, mine in lines.items():
        last = last_traceback(mine, at if rank >= 0 else 0.0)
        if number >= 0 and last is not None and number not in found.raised:
            found.raised[number] = last
            found.started.add(number)
            found.read += 1
