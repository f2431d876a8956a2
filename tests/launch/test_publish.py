"""Where a report goes when a run has ended, and what the console says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import steps, write_folder

from ddpdoctor.config import Options
from ddpdoctor.launch.outcome import publish
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import load


def published(path: Path, capsys: pytest.CaptureFixture[str], **options: object) -> list[str]:
    folder = write_folder(path / "run", {0: steps(3), 1: steps(3)}, ended={0: 0, 1: 0})
    run = load([folder])
    publish(folder, diagnose(run, [], folder="run"), Options(**options), run)  # type: ignore[arg-type]
    return capsys.readouterr().err.splitlines()


def test_the_last_line_says_where_the_page_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert published(tmp_path, capsys, html=page)[-1] == f"page: {page}"
    assert page.exists()


def test_no_line_about_a_page_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = published(tmp_path, capsys, html=tmp_path / "file" / "page.html")
    assert said[-1].startswith("ddpdoctor: cannot save")
    assert not any(line.startswith("page:") for line in published(tmp_path / "b", capsys))


def test_quiet_says_nothing_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published(tmp_path, capsys, html=tmp_path / "page.html", quiet=True) == []
