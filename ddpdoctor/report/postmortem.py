"""From folders to a report: what `report`, `compare` and `ddpdoctor.run.load` have in common."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..events import SCHEMA, RankExiting, RankStarted
from ..run import Run, load
from ..run.liveness import note_alive
from ..storage.run_folder import FolderError, RunFolder
from . import registry
from .coverage import why_nobody
from .diagnose import diagnose
from .findings import Check, Finding, Report, Severity
from .suppression import NOTHING, Unwanted, without


@dataclass(frozen=True)
class Attempts:
    """One run as its folders tell it; the last attempt is the one that counts."""

    folders: tuple[RunFolder, ...]
    runs: tuple[Run, ...]

    @property
    def last(self) -> Run:
        return self.runs[-1]

    def report(self, checks: Sequence[Check], unwanted: Unwanted = NOTHING) -> Report:
        """The last attempt's report; what was found in earlier ones comes after it."""
        folders = ", ".join(str(folder.path) for folder in self.folders)
        return report_of(self.runs, checks, folders, unwanted)


def report_of(
    runs: Sequence[Run], checks: Sequence[Check], folder: str, unwanted: Unwanted = NOTHING
) -> Report:
    """The last attempt's report, with what was wrong in earlier ones and no more is: a note where
    the last one looked for it, since the restart has recovered it."""
    others = registry.others(checks)
    reports = [(run, diagnose(run, checks, folder=folder, others=others)) for run in runs]
    _, last = reports[-1]
    seen = {fault_key(f) for f in last.findings}
    findings = list(last.findings)
    for run, report in reports[:-1]:
        for finding in report.findings:
            if fault_key(finding) not in seen:
                seen.add(fault_key(finding))
                said = f"in attempt {run.attempt}: {finding.summary}"
                recovered = finding.check in last.coverage.examined
                findings.append(
                    msgspec.structs.replace(
                        finding,
                        summary=said,
                        attempt=run.attempt,
                        severity=Severity.NOTE if recovered else finding.severity,
                    )
                )
    findings.sort(key=lambda f: (f.severity.rank, f.at, f.code))
    earlier = tuple(_how_it_ended(run, report) for run, report in reports[:-1])
    summary = msgspec.structs.replace(last.run, earlier=earlier)
    report = msgspec.structs.replace(last, findings=tuple(findings), run=summary)
    return without(report, unwanted, runs[-1], checks)


def _how_it_ended(run: Run, report: Report) -> str:
    """One sentence about an attempt that was followed by another."""
    for finding in report.findings:  # that one was at fault shows later than what others raised
        told = {finding.check, *(c.check for c in finding.consequences)}
        if finding.severity is Severity.ERROR and told & {"rank-died", "first-failure"}:
            return f"attempt {run.attempt} failed: {finding.summary}"
    ends: list[tuple[float, str]] = []
    for rank in run.ranks.values():
        leaving = rank.latest(RankExiting)
        if raised := rank.exception:
            ends.append((rank.wall(raised.at), f"rank {rank.rank} {raised.describe()}"))
        elif (ended := rank.ended) and not ended.by_launcher:
            if ended.signal is not None:
                ends.append((ended.wall, f"rank {rank.rank} was ended by {rank.signal}"))
            elif ended.status:
                at = rank.wall(leaving.at) if leaving else ended.wall
                ends.append((at, f"rank {rank.rank} left with status {ended.status}"))
    return f"attempt {run.attempt} failed: {min(ends)[1] if ends else 'nothing says why'}"


def fault_key(finding: Finding) -> tuple[object, ...]:
    """What makes two findings the same fault."""
    place = finding.location
    return finding.code, finding.subjects, (place.file, place.line) if place else None


def open_run(paths: Sequence[str | os.PathLike[str]]) -> Attempts:
    """Read one run from its folders, one per node.

    Raises:
        FolderError: a folder cannot be used; one line that says what to type instead.
    """
    folders = _each_once([usable(path) for path in paths])
    numbers = sorted({n for folder in folders for n in folder.attempts()})
    every = (load(folders, n, fold=True) for n in numbers)
    runs = [run for run in every if run.ranks or run.unrecorded]
    if not runs:
        nobody = why_nobody(load(folders, numbers[-1]))
        raise FolderError(f"{paths[0]}: it holds no record of a rank; {nobody}")
    for run in runs:
        _readable(run, paths[0])
    for n in numbers:
        _distinct(folders, n)
    note_alive(runs[-1])
    return Attempts(tuple(folders), tuple(runs))


def _each_once(folders: Sequence[RunFolder]) -> list[RunFolder]:
    return list({folder.path.resolve(): folder for folder in folders}.values())


def usable(given: str | os.PathLike[str]) -> RunFolder:
    """The run folder of that path.

    Raises:
        FolderError: it is none; one line that says what to type instead.
    """
    path = Path(given)
    if path.is_file():
        if not RunFolder(path.parent).info_path.exists():
            raise FolderError(f"{path} is no run folder; `ddpdoctor run` prints that of each run")
        raise FolderError(f"{path} is a file; give the run folder: ddpdoctor report {path.parent}")
    if not path.exists():
        raise FolderError(f"no such folder: {path}; `ddpdoctor run` prints the folder of each run")
    if not os.access(path, os.R_OK | os.X_OK):
        raise FolderError(f"{path} may not be read; run as the user who owns it")
    folder = RunFolder(path)
    if re.fullmatch(r"restart-\d+", path.name) and (path.parent / "run.json").exists():
        raise FolderError(
            f"{path} is one attempt of a run; type ddpdoctor report {path.parent}, which tells all"
        )
    if folder.info_path.exists() or any(folder.rank_files(n) for n in folder.attempts()):
        files = [file for n in folder.attempts() for _, file in folder.rank_files(n)]
        if files and not any(os.access(file, os.R_OK) for file in files):
            raise FolderError(
                f"the records in {path} may not be read; run as the user who owns them"
            )
        _known_schema(folder)
        return folder
    inside = [p.parent for p in path.glob("*/run.json")]
    if inside:
        newest = max(inside, key=lambda p: p.name)
        raise FolderError(f"{path} holds runs, it is none itself; give one of them: {newest}")
    if not any(path.iterdir()):
        raise FolderError(f"{path} is empty; `ddpdoctor run` prints the folder of each run")
    raise FolderError(f"{path} is no run folder: it has neither run.json nor rank-*.jsonl")


def _known_schema(folder: RunFolder) -> None:
    info = folder.read_info()
    if info and info.schema_version > SCHEMA:
        raise FolderError(_newer(folder.path, info.schema_version, info.tool_version))


def _readable(run: Run, path: object) -> None:
    for rank in run.ranks.values():
        began = rank.first(RankStarted)
        if began and began.schema > SCHEMA:
            raise FolderError(_newer(path, began.schema, run.info.tool_version))


def _newer(path: object, schema: int, version: str) -> str:
    made = f"ddpdoctor {version}" if version else "a newer ddpdoctor"
    return (
        f"{path}: written by {made} (records of version {schema}, this one reads up to {SCHEMA}); "
        "type pip install -U ddpdoctor"
    )


def _distinct(folders: Sequence[RunFolder], attempt: int) -> None:
    """Two nodes of one run never hold the same rank; two runs do."""
    owner: dict[int, RunFolder] = {}
    for folder in folders:
        for rank in {number for number, _ in folder.rank_files(attempt)}:
            other = owner.setdefault(rank, folder)
            if other is not folder:
                raise FolderError(
                    f"{other.path} and {folder.path} both hold rank {rank}, so they are two runs; "
                    "report them one by one, or type ddpdoctor compare"
                )
