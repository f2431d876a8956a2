"""The report for people: console, text, JSON, HTML, Markdown, and what CI reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import TextIO

from ..report.comparison import Comparison
from ..report.findings import Check, Finding, Report
from ..run import Run
from ..storage.run_folder import write_private
from .safe_text import clean
from .streams import PLAIN_WIDTH, emit, is_terminal, width_of


def console(
    report: Report,
    *,
    stream: TextIO | None = None,
    quiet: bool = False,
    width: int | None = None,
    saved: bool = True,
) -> None:
    """Print a report. Where the stream is no terminal: 80 columns and no escapes.

    A stream that is closed or full loses the report and nothing else.

    Args:
        saved: `findings.json` holds what is left out here.
    """
    from . import terminal

    out = sys.stderr if stream is None else stream
    styled = is_terminal(out)
    width = width or width_of(out)
    content = terminal.render(report, width, styled=styled, quiet=quiet, saved=saved)
    if not quiet:
        content = f"\n{content}"  # apart from what the ranks and the launcher printed
    with contextlib.suppress(OSError, ValueError):
        emit(content, out)


def text(report: Report, width: int = PLAIN_WIDTH, *, styled: bool = False) -> str:
    """The report as text; plain unless `styled`."""
    from . import terminal

    return terminal.render(report, width, styled=styled)


def findings_text(
    findings: Sequence[Finding], width: int, *, styled: bool = False, whole: bool = False
) -> str:
    """Findings alone, as text of that width; `whole`: with all of their evidence."""
    from rich.text import Text

    from . import terminal

    console = terminal.make_console(StringIO(), width, styled)
    for finding in findings:
        for part in terminal.about(finding, console.width, whole=whole):
            terminal.show(console, part)
        terminal.show(console, Text())
    return terminal.captured(console)


def grid_text(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int, *, styled: bool = False
) -> str:
    """A table by columns where it fits that width, else row by row."""
    from . import report_text, terminal

    console = terminal.make_console(StringIO(), width, styled)
    cells = tuple(tuple(clean(cell, 160) for cell in row) for row in rows)
    for part in terminal.grid(report_text.Grid(columns, cells), console.width, ""):
        terminal.show(console, part)
    return terminal.captured(console)


def story(
    runs: Sequence[Run], rank: int, stacks: Sequence[Path], width: int, *, styled: bool = False
) -> str:
    """What one rank did, in the order it happened, through all attempts."""
    from . import timeline

    return timeline.render(runs, rank, stacks, width, styled=styled)


def now(
    run: Run,
    folder: str,
    width: int,
    *,
    gone: bool = False,
    findings: Sequence[Finding] | None = None,
) -> str:
    """Where every rank of a run is (or was, where the run is `gone`), once, as plain text, with
    the findings so far where somebody has looked for them."""
    from . import live

    return live.snapshot(
        run, folder, width, live.MOST_LINES, styled=False, gone=gone, findings=findings
    )


def comparison(change: Comparison, width: int, *, styled: bool = False) -> str:
    """What changed between two runs."""
    from . import comparison_tables

    return comparison_tables.render(change, width, styled=styled)


def comparison_markdown(change: Comparison) -> str:
    """What changed between two runs, for a pull request."""
    from . import markdown_report

    return markdown_report.compared(change)


def page_of(check: Check, checks: Sequence[Check], width: int, *, styled: bool = False) -> str:
    """What `ddpdoctor explain` prints about a check, one of `checks`."""
    from . import explain_pages

    return explain_pages.page(check, checks, width, styled=styled)


def index_of(checks: Sequence[Check], width: int, *, styled: bool = False) -> str:
    """The table of all checks."""
    from . import explain_pages

    return explain_pages.index(checks, width, styled=styled)


def markdown(report: Report) -> str:
    """The report as Markdown, for a pull request or a job summary."""
    from . import markdown_report

    return markdown_report.render(report)


def json(report: Report) -> str:
    """The content of `findings.json`."""
    return report.to_json().decode() + "\n"


def sarif(report: Report) -> str:
    """The report as SARIF 2.1.0, for code scanning."""
    from . import ci_formats

    return ci_formats.sarif(report)


def junit(report: Report) -> str:
    """The report as JUnit XML: a test case for each check."""
    from . import ci_formats

    return ci_formats.junit(report)


def github(report: Report) -> str:
    """The report as annotations of GitHub Actions."""
    from . import ci_formats

    return ci_formats.github(report)


FORMATS: dict[str, Callable[[Report], str]] = {
    "json": json, "markdown": markdown,
    "sarif": sarif, "junit": junit, "github": github,
}  # fmt: skip
"""What `report --format` knows besides `text`, which depends on the terminal; a new format is a
function of the report here."""


def perfetto(run: Run, report: Report) -> str:
    """The run as a trace for https://ui.perfetto.dev."""
    from . import trace

    return trace.render(run, report)


OF_RUNS: dict[str, Callable[[Run, Report], str]] = {"perfetto": perfetto}
"""The formats that show more of a run than its report holds; `render.page` has one more."""


def write_json(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the content of `findings.json`. Raises OSError where that is impossible."""
    write_file(path, json(report).encode())


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a report to a path of the user's. Raises OSError where that is impossible."""
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe
        target.write_bytes(content)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    write_private(target, content)
