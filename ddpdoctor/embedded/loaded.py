"""A report as a notebook shows it: as the page, and its findings as a table."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import msgspec

from ..report.findings import Finding, Report
from ..run import Run

HEIGHT_PX = 720


class LoadedReport(Report, frozen=True, kw_only=True, dict=True):
    """A report with the records that it was made of, for pictures."""

    @classmethod
    def of(cls, report: Report, run: Run) -> LoadedReport:
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        made = cls(**fields)
        msgspec.structs.force_setattr(made, "_run", run)
        return made

    def _repr_html_(self) -> str:
        """The page in a frame of its own, whose script and styles stay inside."""
        from ..render import page

        text = html.escape(page.html(self, self.__dict__.get("_run")))
        return (
            f'<iframe title="ddpdoctor report" sandbox="allow-scripts" srcdoc="{text}" '
            f'style="width:100%;height:{HEIGHT_PX}px;border:0"></iframe>'
        )

    def to_frame(self) -> Any:
        """The findings as a pandas DataFrame, a row for each.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            raise ImportError("to_frame() needs pandas: pip install pandas") from None
        rows = [{name: read(f) for name, read in COLUMNS.items()} for f in self.findings]
        return pandas.DataFrame(rows, columns=list(COLUMNS))


COLUMNS: dict[str, Callable[[Finding], object]] = {
    "code": lambda f: f.code,
    "check": lambda f: f.check,
    "severity": lambda f: f.severity.value,
    "confidence": lambda f: f.confidence.value,
    "ranks": lambda f: list(f.ranks),
    "first_step": lambda f: f.steps.first if f.steps else None,
    "steps": lambda f: f.steps.count if f.steps else None,
    "file": lambda f: f.location.file if f.location else None,
    "line": lambda f: f.location.line if f.location else None,
    "summary": lambda f: f.summary,
    "cause": lambda f: f.cause,
    "fix": lambda f: f.fix,
    "rule": lambda f: f.rule,
}
"""Of the table of findings: how each is read from a finding."""
