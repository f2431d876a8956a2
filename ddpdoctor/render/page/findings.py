"""The findings as the page shows them: excerpts of source, texts with code in them, a name each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...report.findings import Finding, Related, Report
from ...run import fold_ranks
from .. import report_text
from ..report_text import Proof
from ..safe_text import clean, clean_lines

SOURCE_LIMIT = 400
MOST_INDENT = 12


@dataclass(frozen=True)
class Piece:
    """A part of a sentence; `code` where it stood in backticks."""

    text: str
    code: bool = False


@dataclass(frozen=True)
class Block:
    """A paragraph, or lines of code as they are (`code`)."""

    pieces: tuple[Piece, ...]
    code: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the user's code; `main` is the one that the finding points to."""

    number: int
    source: str
    label: str
    main: bool


@dataclass(frozen=True)
class Excerpt:
    """Lines of one file, in the order of their numbers."""

    file: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class View:
    """A finding, ready to print.

    Attributes:
        name: of its place in the page: `DDP301-1`.
        ranks: as `fold_ranks` writes them; empty where it is of no rank.
        entries: names and texts, in the order in which they are read.
    """

    name: str
    severity: str
    check: str
    ranks: str
    code: str
    summary: tuple[Piece, ...]
    doubt: bool
    where: tuple[str, ...]
    excerpts: tuple[Excerpt, ...]
    entries: tuple[tuple[str, tuple[Block, ...]], ...]
    proofs: tuple[Proof, ...]
    rule: str
    explain: str


def views(report: Report) -> list[View]:
    """The findings in their order."""
    names = finding_names(report.findings)
    return [_view(f, name) for f, name in zip(report.findings, names, strict=True)]


def finding_names(findings: Sequence[Finding]) -> list[str]:
    """The place of each in the page: its code and a number among those of that code."""
    seen: Counter[str] = Counter()
    names = []
    for finding in findings:
        code = re.sub(r"[^A-Za-z0-9]", "", finding.code)[:20] or "finding"
        seen[code] += 1
        names.append(f"{code}-{seen[code]}")
    return names


def pieces(text: str) -> tuple[Piece, ...]:
    """A sentence, with what stands in backticks as code."""
    parts = re.split(r"`([^`\n]+)`", text)
    return tuple(Piece(part, n % 2 == 1) for n, part in enumerate(parts) if part)


def blocks(text: str) -> tuple[Block, ...]:
    """A text of several lines; those that are indented are code."""
    found: list[tuple[bool, list[str]]] = []
    for line in clean_lines(text):
        code = line.startswith("    ")
        if not line.strip() and not (found and found[-1][0]):
            found.append((False, []))
        elif found and found[-1][0] == code and (code or found[-1][1]):
            found[-1][1].append(line)
        elif found and found[-1][0] and not line.strip():
            found[-1][1].append("")
        else:
            found.append((code, [line]))
    return tuple(
        Block((Piece(_dedent(lines)),), True) if code else Block(pieces("\n".join(lines)))
        for code, lines in found
        if any(line.strip() for line in lines)
    )


def _dedent(lines: list[str]) -> str:
    least = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[least:] for line in lines).strip("\n")


def _view(finding: Finding, name: str) -> View:
    return View(
        name=name,
        severity=finding.severity.value,
        check=clean(finding.check, 60),
        ranks=fold_ranks(finding.ranks),
        code=clean(finding.code, 20),
        summary=pieces(clean(finding.summary, 1000)),
        doubt=bool(finding.confidence.value == "suspected"),
        where=tuple(report_text.whereabouts(finding)),
        excerpts=tuple(_excerpts(finding)),
        entries=tuple((name, blocks(text)) for name, text in _entries(finding)),
        proofs=tuple(report_text.proofs(finding)),
        rule=report_text.rule(finding),
        explain=report_text.explain_command(finding),
    )


def _entries(finding: Finding) -> Iterator[tuple[str, str]]:
    if text := report_text.subjects(finding):
        yield "Concerns", text
    yield "Cause", finding.cause
    if text := report_text.differed(finding):
        yield "Ranks differ before", text
    yield f"What to do ({finding.fix_kind.value})", finding.fix
    for effect in finding.consequences:
        text = f"{clean(effect.code, 20)} {clean(effect.check, 60)}: {clean(effect.summary, 500)}"
        yield "Follows from it", text


def _excerpts(finding: Finding) -> Iterator[Excerpt]:
    """The lines on record by file, that of the finding first."""
    places: list[tuple[Related, bool]] = []
    if finding.location:
        places.append((Related(finding.label, finding.location), True))
    places += [(related, False) for related in finding.related]
    for file in dict.fromkeys(p.location.file for p, _ in places):
        lines = [_line(p, main) for p, main in places if p.location.file == file]
        if shown := _each_once(line for line in lines if line.source or line.label):
            yield Excerpt(clean(file), tuple(sorted(shown, key=lambda line: line.number)))


def _each_once(lines: Iterable[Line]) -> list[Line]:
    """A line that is pointed to twice has both labels."""
    found: dict[tuple[int, str], Line] = {}
    for line in lines:
        key = (line.number, line.source)
        if (first := found.get(key)) is not None:
            both = "; ".join(x for x in (first.label, line.label) if x)
            line = Line(line.number, line.source, both, first.main or line.main)
        found[key] = line
    return list(found.values())


def _line(place: Related, main: bool) -> Line:
    spot = place.location
    source = clean_lines(spot.source, SOURCE_LIMIT)[0] if spot.source.strip() else ""
    indent = min(len(source) - len(source.lstrip()), MOST_INDENT)
    return Line(spot.line, " " * indent + source.strip(), clean(place.label), main)
