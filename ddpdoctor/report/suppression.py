"""Findings that the user does not want counted: by a comment at their line, by `pyproject.toml`, or
since a baseline has them already. They stay in the report, with the reason."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from ..events import Site
from ..run import Run, shorten
from . import registry
from .findings import Check, Finding, Report, Suppressed

COMMENT = re.compile(r"#\s*ddpdoctor:\s*ignore\[([^\]]*)\]\s*(.*)")
"""`# ddpdoctor: ignore[DDP504, data-overlap] the reason`, at the end of a line."""

NO_REASON = "no reason given"
MOST_FILES, LARGEST_FILE = 200, 1 << 20
"""Of a program's sources, which are read for comments that match nothing, and how large (bytes)."""


@dataclass(frozen=True)
class Ignored:
    """An entry `[[tool.ddpdoctor.ignore]]`: which check (name, code, prefix or family), and why."""

    check: str
    reason: str
    file: str


@dataclass(frozen=True)
class Unwanted:
    """What the user does not want counted, besides the comments in the source.

    Attributes:
        ignored: the entries of `pyproject.toml`.
        known: fingerprints of the findings of the `baseline`, a file.
    """

    ignored: tuple[Ignored, ...] = ()
    known: frozenset[str] = frozenset()
    baseline: str = ""


NOTHING = Unwanted()


def fingerprint(finding: Finding) -> str:
    """What stays the same from run to run while the fault is the same: check, rule, name of the
    file and text of the line, but not its number, and no measured figure."""
    place = finding.location
    parts = (
        finding.code,
        finding.rule,
        *((PurePath(place.file).name, place.source.strip()) if place else ()),
    )
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:32]


def read_baseline(path: Path) -> frozenset[str]:
    """The fingerprints of the findings in a `findings.json`, those suppressed in it included.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    every = (*report.findings, *(s.finding for s in report.suppressed))
    return frozenset(map(fingerprint, every))


def by_comment(
    findings: Iterable[Finding], checks: Sequence[Check]
) -> tuple[list[Finding], list[Suppressed]]:
    """The findings without those that a comment at their line suppresses, and these."""
    kept: list[Finding] = []
    suppressed: list[Suppressed] = []
    for finding in findings:
        place = finding.location
        asked = COMMENT.search(place.source) if place else None
        if asked and any(_meant(word, finding, checks) for word in _words(asked[1])):
            reason = asked[2].strip() or NO_REASON
            suppressed.append(Suppressed(finding, reason, str(place)))
        else:
            kept.append(finding)
    return kept, suppressed


def without(report: Report, unwanted: Unwanted, run: Run, checks: Sequence[Check]) -> Report:
    """The report with the findings that are not to be counted apart, and with the suppressions that
    match nothing although their check was examined."""
    kept: list[Finding] = []
    suppressed = list(report.suppressed)
    used: set[Ignored] = set()
    for finding in report.findings:
        entry = next((i for i in unwanted.ignored if _meant(i.check, finding, checks)), None)
        if entry:
            used.add(entry)
            suppressed.append(Suppressed(finding, entry.reason or NO_REASON, entry.file))
        elif fingerprint(finding) in unwanted.known:
            suppressed.append(Suppressed(finding, "known before", unwanted.baseline))
        else:
            kept.append(finding)
    examined = [c for c in checks if c.name in report.coverage.examined]
    unused = [
        f"ignore of {entry.check} in {entry.file}"
        for entry in unwanted.ignored
        if entry not in used and any(registry.fits(c, entry.check) for c in examined)
    ]
    unused += _unused_comments(run, report, examined)
    return msgspec.structs.replace(
        report,
        findings=tuple(kept),
        suppressed=tuple(suppressed),
        unused_suppressions=tuple(unused),
    )


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _meant(word: str, finding: Finding, checks: Sequence[Check]) -> bool:
    """Whether a name, code, prefix or family means the check of a finding."""
    check = next((c for c in checks if c.name == finding.check), None)
    if check is None:
        return word.lower() == finding.check or word.upper() == finding.code
    return registry.fits(check, word)


def _unused_comments(run: Run, report: Report, examined: Sequence[Check]) -> list[str]:
    """Comments in the files that the ranks ran, of checks that were examined and found nothing at
    that line. Files that are not here (any more) are passed over."""
    used = {s.where for s in report.suppressed}
    files = {e.file for rank in run.ranks.values() for e in rank.of(Site)}
    cwd = next((rank.cwd for rank in run.ranks.values() if rank.cwd), "")
    found = []
    for name in sorted(files)[:MOST_FILES]:
        path = Path(name)
        try:
            if not path.is_absolute() or path.stat().st_size > LARGEST_FILE:
                continue
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        shown = shorten(name, cwd)
        for number, line in enumerate(lines, 1):
            asked = COMMENT.search(line)
            place = f"{shown}:{number}"
            if not asked or place in used:
                continue
            looked = [w for w in _words(asked[1]) if any(registry.fits(c, w) for c in examined)]
            if looked:
                found.append(f"ignore[{', '.join(looked)}] at {place}")
    return found
