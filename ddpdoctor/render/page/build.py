"""Fills the template of the page.

What comes from a run is text of `safe_text`, and the template escapes all of it. The one script is
named by its digest in the page's Content-Security-Policy, so no other one runs, and nothing can be
fetched or sent.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...report.comparison import Comparison
from ...report.findings import Report, Severity
from ...run import Run, counted, ranks_text
from .. import comparison_tables, report_text
from ..safe_text import clean, clean_lines
from . import findings, lanes, ledger_bars, maps, waits
from .findings import Piece

T = TypeVar("T")

FILES = Path(__file__).parent / "templates"

Verdict = tuple[str, str, list[tuple[tuple[Piece, ...], str]]]
"""A word for the colour, the first sentence, and more of them with the finding each is about."""


def render(report: Report, run: Run | None = None) -> str:
    title, *facts = report_text.headline(report)
    shown = findings.views(report)
    script = _file("page.js")
    page = _environment().get_template("page.html.j2")
    not_drawn = _only_here(report, run)

    def picture(draw: Callable[[Report, Run], T]) -> T | None:
        """What `draw` makes of the records; a failure of its own costs the picture only."""
        try:
            return draw(report, run) if run is not None else None
        except Exception as error:
            what = draw.__module__.rpartition(".")[2]
            not_drawn.append(clean(f"the picture of {what} could not be drawn: {error!r}"))
            return None

    return page.render(
        policy=_policy(script),
        style=Markup(_file("page.css")),
        script=Markup(script),
        title=title,
        facts=[*facts, *report_text.machines(report)],
        verdict=_verdict(report, shown),
        findings=shown,
        severities=[s.value for s in Severity if any(v.severity == s.value for v in shown)],
        checks=sorted({v.check for v in shown}),
        suppressed=report_text.suppressed(report),
        gaps=report_text.gaps(report),
        skipped=[
            (clean(s.check, 60), clean(s.reason))
            for s in (*report.coverage.skipped, *report.coverage.partly)
        ],
        examined=len(report.coverage.examined),
        waits=picture(waits.picture),
        timeline=picture(lanes.windows) or [],
        maps=picture(maps.maps),
        ranks_known=len(report.ranks),
        not_drawn=not_drawn,
        ledger=Markup("\n".join(ledger_bars.bars(report))),
        ranks=report_text.rank_grid(report) if report.ranks else None,
        tables=report_text.tables(report),
        overhead=report_text.overhead(report),
        tool=f"{report.tool.name} {report.tool.version}",
    )


def render_comparison(change: Comparison) -> str:
    """The page about two runs; it has no script."""
    both = (("before", change.before), ("after", change.after))
    return (
        _environment()
        .get_template("comparison.html.j2")
        .render(
            policy=_policy(""),
            style=Markup(_file("page.css")),
            runs=[
                (when, report_text.headline(report)[1:2], clean(report.run.folder))
                for when, report in both
            ],
            unlike=[clean(reason) for reason in change.unlike],
            groups=[
                (name, [(f, *report_text.first_line(f), clean(f.location or "")) for f in found])
                for name, found in comparison_tables.groups(change)
            ],
            figures=comparison_tables.figures_grid(change.figures) if change.figures else None,
        )
    )


def _only_here(report: Report, run: Run | None) -> list[str]:
    """Which ranks the pictures show, where the records of others are on another node."""
    gone = {r.rank for r in report.ranks} - run.ranks.keys() if run is not None else set()
    if run is None or not gone:
        return []
    if gone <= run.folded.keys():
        return [f"The pictures show {ranks_text(run.ranks)}: the others did the same."]
    return [f"The pictures show {ranks_text(run.ranks)}: the records of the others are not here."]


def _verdict(report: Report, shown: list[findings.View]) -> Verdict:
    """How it ended and how much was found; then the first finding, which is the worst one."""
    lines = [findings.pieces(line) for line in report_text.verdict(report)]
    if not shown:
        well = report.run.outcome == "completed" and report.coverage.examined and report.ranks
        (first, *rest) = report_text.verdict(report)
        word = ("note" if report.lost else "well") if well else "unknown"
        return word, _sentence(first), [(findings.pieces(_sentence(line)), "") for line in rest]
    ended = report_text.ending(report)
    counts = "".join(piece.text for piece in lines[0])
    first = f"The run {_how(ended)}: {counts}."
    more: list[tuple[tuple[Piece, ...], str]] = [(shown[0].summary, shown[0].name)]
    more += [(line, "") for line in lines[1:]]
    return shown[0].severity, first, more


def _how(ended: str) -> str:
    """`completed`, `was killed (signal 9)`, as it follows `The run`."""
    if ended.startswith(("killed", "still", "incomplete")):
        return f"{'is' if not ended.startswith('killed') else 'was'} {ended}"
    return ended


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_harmless,
    )
    made.filters["counted"] = counted
    made.filters["lines"] = _lines
    return made


def _lines(text: str) -> str:
    return "\n".join(clean_lines(text))


def _harmless(value: object) -> object:
    """The last line of defence: text that nobody cleaned holds no control characters either."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


@lru_cache(maxsize=4)
def _file(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")
