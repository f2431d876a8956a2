"""`ddpdoctor report`: what it prints, how it exits, what it refuses."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from commands import Caught, refused
from recordings import started, steps, write_folder

from ddpdoctor.cli import main
from ddpdoctor.events import Site


def test_report(good: Path, capsys: Caught) -> None:
    assert main(["report", str(good)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "completed after 60 s: 2 ranks, torch 2.13.0" in out
    assert "error[DDP997] toy-step" in out
    assert out.splitlines()[-3:] == [
        "the doctor's own time was not measured",
        "Python 3.11.4",
        "host: 0 cores",
    ]


def test_report_formats(good: Path, capsys: Caught, tmp_path: Path) -> None:
    extra = ["--json", str(tmp_path / "f.json"), "--html", str(tmp_path / "f.html")]
    assert main(["report", str(good), "--format", "json", *extra]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [f["code"] for f in told["findings"]] == ["DDP997"]
    assert json.loads((tmp_path / "f.json").read_text()) == told
    assert "DDP997" in (tmp_path / "f.html").read_text()
    assert main(["report", str(good), "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["report", str(good), "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("## `ddpdoctor 0.1.0: ddpdoctor run train.py`")


def test_report_fails_on_request(good: Path, capsys: Caught) -> None:
    assert main(["report", str(good), "--fail-on", "warning"]) == 3
    assert main(["report", str(good), "--fail-on", "warning", "--ignore", "toy-step"]) == 0
    assert main(["report", str(good), "--fail-on", "note", "--select", "toy-quiet"]) == 0


def test_report_refuses_what_is_no_run(tmp_path: Path, good: Path, capsys: Caught) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    bare = write_folder(tmp_path / "bare", {}).path
    assert "no such folder" in refused(capsys, "report", tmp_path / "nope")
    assert f"ddpdoctor report {good}" in refused(capsys, "report", good / "run.json")
    assert "no record of a run" in refused(capsys, "report", tmp_path / "other" / "notes.txt")
    assert "is empty" in refused(capsys, "report", tmp_path / "empty")
    assert "neither run.json nor rank-" in refused(capsys, "report", tmp_path / "other")
    assert "holds no record of a rank" in refused(capsys, "report", bare)
    assert f"give one of them: {good}" in refused(capsys, "report", tmp_path)
    assert "both hold rank 0" in refused(
        capsys, "report", good, write_folder(tmp_path / "b", {0: []}).path
    )
    assert "cannot write" in refused(capsys, "report", good, "--json", good / "run.json" / "x")
    assert "no check is called" in refused(capsys, "report", good, "--select", "nothing")
    assert "--format" in refused(capsys, "report", good, "--format", "pdf")


def test_report_refuses_newer_records(tmp_path: Path, capsys: Caught) -> None:
    newer = write_folder(tmp_path / "n", {0: []}, schema_version=99, tool_version="9.0").path
    assert "written by ddpdoctor 9.0" in refused(capsys, "report", newer)
    rank = write_folder(tmp_path / "r", {0: [started(0, 1, schema=99)]}).path
    assert "pip install -U ddpdoctor" in refused(capsys, "report", rank)


def test_report_joins_nodes(tmp_path: Path, capsys: Caught) -> None:
    a = write_folder(tmp_path / "a", {0: steps(3)}, world_size=2).path
    b = write_folder(tmp_path / "b", {1: steps(3)}, world_size=2).path
    assert main(["report", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "no record" not in out
    assert main(["report", str(a)]) == 0
    assert "missing: rank 1 was not observed: no record" in capsys.readouterr().out


def test_report_tells_what_the_records_lack(good: Path, capsys: Caught) -> None:
    first, second = sorted(good.glob("rank-*.jsonl"))
    second.write_bytes(second.read_bytes()[:-5])
    first.write_bytes(first.read_bytes() + b"garbage\n\xff\xfe\n")
    assert main(["report", str(good)]) == 0
    out = capsys.readouterr().out
    assert "2 unreadable lines in the records of rank 0" in out
    assert "the records of rank 1 stop early" in " ".join(out.split())
    (good / "node-0.jsonl").unlink()
    assert main(["report", str(good)]) == 0
    assert "the last line in the records of rank 1 is cut short" in capsys.readouterr().out
    second.write_bytes(b"")
    assert main(["report", str(good)]) == 0
    assert "rank 1 was not observed: the record is empty" in capsys.readouterr().out


@pytest.mark.parametrize(("kept", "behind"), [(5, True), (9, False), (10, False)])
@pytest.mark.parametrize("seen", [True, False])
def test_report_says_how_far_cut_records_go(
    seen: bool, kept: int, behind: bool, good: Path, capsys: Caught
) -> None:
    """Unless they go as far as the others': a rank that was killed there has no more to tell."""
    record = good / "rank-1.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    at = [n for n, line in enumerate(lines) if b'"step"' in line]
    record.write_bytes(b"".join(lines[: at[kept - 1] + 1]) + b'["st')
    if not seen:
        (good / "node-0.jsonl").unlink()
    assert main(["report", str(good)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("in the middle of a line" if seen else "rank 1 is cut short") in out
    assert (f", at step {kept} of 10: " in out) is behind
    assert ("nothing is known of what came after" in out) is (seen or behind)


def test_report_names_what_may_not_be_read(
    good: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = {path for path in good.glob("rank-*.jsonl") if path.stem == "rank-1"}
    opened, allowed = os.open, os.access

    def open_(path: Path, *rest: int) -> int:
        if path in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "access", lambda path, how: path not in closed and allowed(path, how))
    assert main(["report", str(good)]) == 0
    assert "missing: rank-1.jsonl may not be read (Permission denied)" in capsys.readouterr().out
    closed.update(good.glob("rank-*.jsonl"))
    assert "may not be read; run as the user who owns them" in refused(capsys, "report", good)


def test_report_shows_earlier_attempts(tmp_path: Path, capsys: Caught) -> None:
    write_folder(tmp_path / "run", {0: steps(3)}, ended={0: 1})
    folder = write_folder(tmp_path / "run", {0: []}, attempt=1).path
    assert main(["report", str(folder), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(f["code"], f["attempt"]) for f in told["findings"]] == [("DDP997", 0)]
    assert told["findings"][0]["summary"].startswith("in attempt 0: ")
    assert told["ranks"][0]["state"] == "finished"


def test_report_of_one_rank(good: Path, capsys: Caught) -> None:
    (good / "rank-1.stacks.txt").write_text("Thread 0x1\n  File train.py, line 88 \x1b[31m")
    assert main(["report", str(good), "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 1 of 2 on host\nfinished (exit 0) after 10 steps")
    assert "steps 0-9 at train.py:88, 0.1 s each" in out
    assert "last step at train.py:88" in out
    assert "rank-1.stacks.txt\n  Thread 0x1\n    File train.py, line 88" in out
    assert "\x1b" not in out
    assert "recorded ranks: 0-1" in refused(capsys, "report", good, "--rank", "5")
    told = refused(capsys, "report", good, "--rank", "1", "--format", "json")
    assert "omit --format json" in told


def test_defaults_from_the_file(good: Path, somewhere: Path, capsys: Caught) -> None:
    (somewhere / "pyproject.toml").write_text('[tool.ddpdoctor]\nfail-on = "error"\n')
    assert main(["report", str(good)]) == 3


def test_report_names_files_as_the_reader_would(
    tmp_path: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("here.py", "gone.py"):
        (project / name).touch()
    events = [
        started(0, 1, cwd=str(project)),
        *(
            Site(at=0, id=n, file=str(project / name), line=88, function="main", text="")
            for n, name in enumerate(("here.py", "gone.py"))
        ),
        *steps(3, site=0),
    ]
    folder = write_folder(tmp_path / "run", {0: events}).path
    (project / "gone.py").unlink()
    ended = "last step at %s:88"
    beside = tmp_path / "beside"
    beside.mkdir()
    full = str(project / "here.py")
    for place, shown in ((project, "here.py"), (tmp_path, "project/here.py"), (beside, full)):
        monkeypatch.chdir(place)
        assert main(["report", str(folder), "--rank", "0"]) == 0
        assert ended % shown in capsys.readouterr().out
    gone = write_folder(tmp_path / "old", {0: [*events[:3], *steps(3, site=1)]}).path
    assert main(["report", str(gone), "--rank", "0"]) == 0
    assert ended % "gone.py" in capsys.readouterr().out
