"""The report as one HTML page that needs nothing beside it and no network."""

from __future__ import annotations

import os

from ...report.comparison import Comparison
from ...report.findings import Report
from ...run import Run
from .. import write_file


def html(report: Report, run: Run | None = None) -> str:
    """The page.

    Args:
        run: its records, of which the pictures are drawn; without them the page has none.
    """
    from . import build

    return build.render(report, run)


def comparison(change: Comparison) -> str:
    """What changed between two runs, as a page."""
    from . import build

    return build.render_comparison(change)


def write(report: Report, path: str | os.PathLike[str], run: Run | None = None) -> None:
    """Write the page. Raises OSError where that is impossible."""
    write_file(path, html(report, run).encode(errors="replace"))
