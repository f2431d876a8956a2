"""A report in a notebook: the page in a frame, the findings as a table."""

from __future__ import annotations

import html
import sys
from pathlib import Path

import pytest
from recordings import steps, write_folder

import ddpdoctor


def loaded(tmp_path: Path) -> ddpdoctor.embedded.loaded.LoadedReport:  # type: ignore[name-defined]
    folder = write_folder(
        tmp_path / "run</iframe><script>", {0: steps(30), 1: steps(30)}, ended={1: -9}
    )
    return ddpdoctor.load(folder.path)


def test_a_notebook_shows_the_page_in_a_frame(tmp_path: Path) -> None:
    shown = loaded(tmp_path)._repr_html_()
    assert shown.startswith("<iframe ") and shown.count("<") == 2, "all of the page is quoted"
    assert 'sandbox="allow-scripts"' in shown, "the page cannot reach the notebook"
    page = html.unescape(shown)
    assert "DDP605" in page and 'class="map"' in page, "with pictures of the records"


def test_findings_as_a_table(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    report = loaded(tmp_path)
    frame = report.to_frame()
    assert len(frame) == len(report.findings) > 0
    row = frame[frame.code == "DDP605"].iloc[0]
    assert (row.severity, row.ranks) == ("error", [1])
    assert report.to_dict()["findings"], "it is a report as before"


def test_without_pandas_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = loaded(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        report.to_frame()
