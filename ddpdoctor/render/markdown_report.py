"""A report as Markdown, for a pull request or the summary of a job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..report.comparison import Comparison
from ..report.findings import Finding, Report
from ..run import Location
from . import comparison_tables, report_text
from .report_text import Grid, Proof
from .safe_text import clean, clean_lines

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~@&$-])")


def render(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def compared(change: Comparison) -> str:
    """What changed between two runs."""
    return "\n".join(_compared(change)) + "\n"


def _compared(change: Comparison) -> Iterator[str]:
    yield "## Two runs compared"
    yield ""
    for when, report in (("before", change.before), ("after", change.after)):
        ended = report_text.headline(report)[1]
        yield f"- {when}: {_text(ended)}, {_code(report.run.folder)}"
    yield from (f"- differs: {_text(clean(reason))}" for reason in change.unlike)
    yield ""
    shown = comparison_tables.groups(change)
    if not shown:
        yield "No findings in either run."
        yield ""
    for name, findings in shown:
        yield f"### {name} ({len(findings)})"
        yield ""
        for finding in findings:
            code, sentence = report_text.first_line(finding)
            yield f"- **{_text(code)}** {_text(sentence)}{_text(clean(finding.elsewhere))}"
        yield ""
    if change.figures:
        yield from _grid(comparison_tables.figures_grid(change.figures))


def _lines(report: Report) -> Iterator[str]:
    title, *more = report_text.headline(report)
    yield f"## {_code(title)}"
    yield ""
    for line in (*more, *report_text.verdict(report)):
        yield f"{_text(line)}  "
    yield ""
    for finding in report.findings:
        yield from _finding(finding)
    if report.ranks:
        yield from _grid(report_text.rank_grid(report))
    for grid in report_text.tables(report):
        yield f"**{_text(grid.title)}**"
        yield ""
        yield from _grid(grid)
    last = (*report_text.suppressed(report), *report_text.gaps(report))
    for line in (*last, report_text.overhead(report), *report_text.machines(report)):
        yield f"{_text(line)}  "


def _finding(finding: Finding) -> Iterator[str]:
    code, sentence = report_text.first_line(finding)
    yield f"### {_text(code)} {_text(sentence)}"
    yield ""
    if where := "   ".join(report_text.whereabouts(finding)):
        yield _text(where)
        yield ""
    if finding.location:
        yield from _source(finding.location, finding.label)
    for related in finding.related:
        yield f"{_code(clean(related.location))}: {_text(clean(related.label))}"
        yield from _source(related.location, "")
    if text := report_text.subjects(finding):
        yield f"- concerns: {_text(text)}"
    yield from _block("cause", finding.cause)
    if text := report_text.differed(finding):
        yield f"- ranks differ before: {_text(text)}"
    yield from _block(f"help ({finding.fix_kind.value})", finding.fix)
    for effect in finding.consequences:
        yield f"- follows from it: {_text(f'{effect.code} {effect.check}: {effect.summary}')}"
    for proof in report_text.proofs(finding):
        yield from _proof(proof)
    if rule := report_text.rule(finding):
        yield f"- rule: {_code(rule)}"
    yield f"- explain: {_code(report_text.explain_command(finding))}"
    yield ""


def _source(place: Location, label: str) -> Iterator[str]:
    if place.source:
        yield ""
        yield f"    {place.line} | {clean_lines(place.source, 400)[0]}"
        yield ""
    if label:
        yield f"*{_text(clean(label))}*"
        yield ""


def _proof(proof: Proof) -> Iterator[str]:
    if proof.grid:
        yield f"- evidence: {_text(proof.name)}"
        yield ""
        yield from _grid(proof.grid)
    elif proof.block:
        yield from _block(f"evidence: {proof.name}", proof.block)
    else:
        yield f"- evidence: {_text(proof.name)}: {_text(proof.line)}"


def _block(name: str, text: str) -> Iterator[str]:
    """Prose in the list item, indented lines below it as code."""
    first, *rest = clean_lines(text)
    yield f"- {_text(name)}: {_text(first)}"
    if rest:
        yield ""
        yield from (f"      {line}" for line in rest)
        yield ""


def _grid(grid: Grid) -> Iterator[str]:
    yield f"| {' | '.join(_text(c) for c in grid.columns)} |"
    yield f"|{' --- |' * len(grid.columns)}"
    for row in grid.rows:
        yield f"| {' | '.join(_text(c) for c in row)} |"
    yield ""
    if grid.more:
        yield f"and {grid.more} more"
        yield ""


def _text(text: str) -> str:
    """Data as plain text: whatever Markdown or HTML would read as markup is escaped."""
    return _SPECIAL.sub(r"\\\1", clean(text, 2000)).replace("\\<", "&lt;").replace("\\>", "&gt;")


def _code(text: str) -> str:
    return f"`{clean(text).replace('`', chr(39))}`"
