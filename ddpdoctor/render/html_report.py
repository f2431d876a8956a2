"""A report as one HTML page that needs nothing beside it. All data is escaped text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..report.findings import Finding, Report
from ..run import Location
from . import ledger_bars, report_text
from .report_text import Grid, Proof
from .safe_text import clean, clean_lines

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --error: #c62828; --warning: #b26a00;
        --note: #00707f; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 0 0 .4rem }
code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { overflow-x: auto; background: #8881; padding: .5rem; margin: .4rem 0 }
table { border-collapse: collapse; margin: .6rem 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .8rem .15rem 0; text-align: left }
section { border-left: 4px solid var(--line); padding: .2rem 0 .2rem 1rem; margin: 1.5rem 0 }
section.error { border-color: var(--error) } section.warning { border-color: var(--warning) }
section.note { border-color: var(--note) }
.error b { color: var(--error) } .warning b { color: var(--warning) } .note b { color: var(--note) }
dt { font-weight: 600; margin-top: .4rem } dd { margin: 0; white-space: pre-wrap }
.where, footer { opacity: .8 } .label { font-style: italic }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Report) -> str:
    title, *facts_lines = report_text.headline(report)
    body = [f"<h1>{_t(title)}</h1>", *(f"<div>{_t(line)}</div>" for line in facts_lines)]
    body += [f"<p><strong>{_t(line)}</strong></p>" for line in report_text.verdict(report)]
    for finding in report.findings:
        body += _finding(finding)
    body += ledger_bars.bars(report)
    if report.ranks:
        body.append(_grid(report_text.rank_grid(report)))
    for grid in report_text.tables(report):
        body += [f"<h2>{_t(grid.title)}</h2>", _grid(grid)]
    body.append("<footer>")
    body += [
        f"<div>{_t(line)}</div>"
        for line in (
            *report_text.suppressed(report),
            *report_text.gaps(report),
            report_text.overhead(report),
        )
    ]
    body.append(f"<div>{_t(f'{report.tool.name} {report.tool.version}')}</div></footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ddpdoctor: {_t(title)}</title>"
        f"<style>{_STYLE}{ledger_bars.STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _finding(finding: Finding) -> Iterator[str]:
    code, sentence = report_text.first_line(finding)
    yield f'<section class="{finding.severity.value}"><h2><b>{_t(code)}</b> {_t(sentence)}</h2>'
    if where := "   ".join(report_text.whereabouts(finding)):
        yield f'<div class="where">{_t(where)}</div>'
    if finding.location:
        yield _source(finding.location, finding.label)
    for related in finding.related:
        yield f'<div class="where">{_t(clean(related.location))}</div>'
        yield _source(related.location, related.label)
    yield "<dl>"
    if text := report_text.subjects(finding):
        yield _entry("concerns", text)
    yield _entry("cause", _block(finding.cause))
    if text := report_text.differed(finding):
        yield _entry("ranks differ before", text)
    yield _entry(f"help ({finding.fix_kind.value})", _block(finding.fix))
    for effect in finding.consequences:
        text = f"{clean(effect.code)} {clean(effect.check)}: {clean(effect.summary, 500)}"
        yield _entry("follows from it", text)
    if rule := report_text.rule(finding):
        yield _entry("rule", rule)
    yield _entry("explain", report_text.explain_command(finding))
    yield "</dl>"
    if proofs := report_text.proofs(finding):
        yield "<details><summary>evidence</summary><dl>"
        yield from map(_proof, proofs)
        yield "</dl></details>"
    yield "</section>"


def _source(place: Location, label: str) -> str:
    source = clean_lines(place.source, 400)[0] if place.source else ""
    code = f"<pre>{place.line} | {_t(source)}</pre>" if source else ""
    return f'{code}<div class="label">{_t(clean(label))}</div>' if label else code


def _proof(proof: Proof) -> str:
    if proof.grid:
        return f"<dt>{_t(proof.name)}</dt><dd>{_grid(proof.grid)}</dd>"
    if proof.block:
        return f"<dt>{_t(proof.name)}</dt><dd><pre>{_t(_block(proof.block))}</pre></dd>"
    return _entry(proof.name, proof.line)


def _entry(name: str, text: str) -> str:
    return f"<dt>{_t(name)}</dt><dd>{_t(text)}</dd>"


def _block(text: str) -> str:
    return "\n".join(clean_lines(text))


def _grid(grid: Grid) -> str:
    head = "".join(f"<th>{_t(c)}</th>" for c in grid.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{_t(c)}</td>' for c in row)}</tr>\n" for row in grid.rows)
    more = f"<tr><td>and {grid.more} more</td></tr>" if grid.more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}{more}</tbody></table>"


def _t(text: str) -> str:
    return escape(text, quote=True)
