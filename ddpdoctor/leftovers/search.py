"""Which of some files and folders are what a run left behind, and of which rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..run import ranks_text
from ..storage.flight_dumps import Dump, DumpError, read_dump
from .failures import Raised, by_rank, error_file, exit_codes, last_traceback, root_causes

MOST_FILES = 20_000
LONGEST_LOG = 64 << 20
"""Files looked at, and bytes read of a log: its end."""

STALE_S = 6 * 3600.0
"""Between the last calls in the dumps of one run, at most."""

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
            lines.append(f"no dump of {ranks_text(lacking)}: where they were is not known")
        lines += [f"not used: {path}: {why}" for path, why in self.ignored]
        return lines


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
        for file in _files(path):
            _look(found, file, files)
    newest = max((d.last for d in found.dumps.values()), default=0.0)
    for rank, dump in list(found.dumps.items()):
        if newest - dump.last > STALE_S:
            del found.dumps[rank]
            found.ignored.append((files[rank], "it is hours older than the others: of another run"))
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        # The newest attempt of a launcher's log folder stands for the run.
        newest = max(path.rglob("attempt_*"), key=lambda p: p.name, default=None)
        for n, file in enumerate(sorted(path.rglob("*"))):
            attempt = next((p for p in file.parts if p.startswith("attempt_")), "")
            if n < MOST_FILES and file.is_file() and (not attempt or attempt == newest.name):  # type: ignore[union-attr]
                yield file


def _look(found: Leftovers, file: Path, files: dict[int, Path]) -> None:
    in_folder = file.parent.name if _RANK_FOLDER.match(file.parent.name) else ""
    rank = int(in_folder) if in_folder and "attempt_" in str(file) else -1
    if file.name == "error.json" or (file.suffix == ".json" and rank >= 0):
        if rank >= 0 and (raised := error_file(file)) is not None:
            found.raised[rank] = raised
            found.started.add(rank)
            found.read += 1
        return
    if numbered := _DUMP.search(file.name):
        try:
            found.dumps[int(numbered[1])] = read_dump(file)
            files[int(numbered[1])] = file
            found.read += 1
        except DumpError as error:
            found.ignored.append((file, str(error)))
        return
    if file.suffix in (".log", ".txt", ".err", ".out", ""):
        _read_log(found, file, rank)


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
    for number, (code, _) in exit_codes(text).items():
        found.codes[number] = code
        found.started.add(number)
        found.read += 1
    for number, raised in root_causes(text):
        found.raised.setdefault(number, raised)
    lines: dict[int, list[str]] = {}
    for number, line in by_rank(text.splitlines(), rank):
        lines.setdefault(number, []).append(line)
    for number, mine in lines.items():
        last = last_traceback(mine, at if rank >= 0 else 0.0)
        if number >= 0 and last is not None and number not in found.raised:
            found.raised[number] = last
            found.started.add(number)
            found.read += 1
