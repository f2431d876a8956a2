"""A run folder may come from anybody: reading it harms nothing and shows nothing but text."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recordings import make_run, site, started, steps, write_folder
from sampling import inherited

from ddpdoctor import render
from ddpdoctor.events import ExceptionRaised
from ddpdoctor.render import page
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Check, Confidence, Finding, Severity
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.report.registry import all_checks
from ddpdoctor.run import Location

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202egnp\u2066\x9b5m"
MARKUP = "[bold red]x[/] [link=file:///etc/passwd]y[/link] <script>alert(1)</script> `rm` | * _"
EVIL = f"{ESCAPES}{MARKUP}\r\nsecond line"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Evil(Check):
    """Says what a hostile folder made it say."""

    code, name, family, severity = "DDP999", "evil", "launch", Severity.ERROR

    def examine(self, run):  # type: ignore[no-untyped-def]
        yield Finding(
            code=self.code,
            check=self.name,
            severity=Severity.ERROR,
            confidence=Confidence.PROVEN,
            summary=EVIL,
            cause=EVIL,
            fix=EVIL,
            label=EVIL,
            subjects=(EVIL,),
            location=Location(f"../../{EVIL}.py", 3, EVIL, EVIL),
            evidence={EVIL: [{EVIL: EVIL}], "n": EVIL},
        )


def hostile_report():  # type: ignore[no-untyped-def]
    run = make_run(
        {
            0: [
                started(0, 1, node=EVIL, cwd="/", argv=(EVIL,), python=EVIL),
                site(1, EVIL, 1, EVIL, EVIL),
                *steps(2, site=1),
                ExceptionRaised(at=0, kind=EVIL, message=EVIL, frames=()),
            ]
        },
        ended={0: 1},
        command=["train.py", EVIL],
        torch=EVIL,
    )
    return run, diagnose(run, [Evil(), *all_checks()], folder=EVIL)


@pytest.mark.parametrize("show", [render.text, render.markdown])
def test_no_escape_reaches_the_terminal(show) -> None:  # type: ignore[no-untyped-def]
    _, report = hostile_report()
    printed = show(report)
    assert not CONTROL.search(printed), CONTROL.search(printed)
    assert "owned" in printed, "the text itself stays visible"


def test_styled_output_escapes_only_what_is_ours() -> None:
    _, report = hostile_report()
    printed = render.text(report, 100, styled=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert not CONTROL.search(plain)
    assert "\x1b]" not in printed


def test_the_page_holds_no_foreign_markup() -> None:
    run, report = hostile_report()
    shown = page.html(report, run)
    assert "<script>alert" not in shown
    assert not CONTROL.search(shown)


def test_the_story_of_a_rank_is_plain() -> None:
    run, _ = hostile_report()
    assert not CONTROL.search(render.story([run], 0, [], 100))


def test_lines_from_hell_are_skipped(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(3)})
    with (folder.path / "rank-0.jsonl").open("ab") as file:
        file.write(b"[" * 200_000 + b"\n")
        file.write(b'{"event":' * 50_000 + b"\n")
        file.write(b"x" * 9_000_000 + b"\n")
        file.write(b'{"event":"step","at":1e999,"optimizer":0,"step":99999999999999999999}\n')
        file.write(b"\xff\xfe\x00\n\x00\n")
        file.write(json.dumps({"event": "site", "at": 1, "id": 1, "file": "\ud800"}).encode())
    began = time.monotonic()
    report = open_run([folder.path]).report(all_checks())
    assert time.monotonic() - began < 20
    assert [r.steps for r in report.ranks] == [3, 3]
    assert any("unreadable" in lost for lost in report.coverage.lost)


class Runs:
    """A pickle that would run a command where it is loaded as usual."""

    def __reduce__(self) -> object:
        return os.system, ("touch owned",)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"entries": [Runs()]}), b"\x80\x04]", b"{", b""],
    ids=["command", "cut", "text", "empty"],
)
def test_a_flight_recorders_dump_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(3)})
    (folder.path / "flight-rank-0").write_bytes(content)
    os.mkfifo(folder.path / "flight-rank-1")
    run = open_run([folder.path])
    run.report(all_checks())
    assert [rank.flight_logs() for rank in run.runs[-1].ranks.values()] == [[], []]
    assert not (tmp_path / "owned").exists()


def test_bytes_that_are_no_text_make_a_file_unreadable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: [started(0, 1)]})
    assert folder.read_info() is not None
    folder.info_path.write_bytes(folder.info_path.read_bytes().replace(b"train", b"tr\xe5in"))
    assert folder.read_info() is None


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"event":"step","at":1,"optimizer":0,"step":7,"site":-1,"wall_s":1}\n')
    folder = write_folder(tmp_path / "run", {0: steps(1)}).path
    (folder / "rank-1.jsonl").symlink_to(secret)
    (folder / "rank-2.jsonl").symlink_to("/dev/zero")
    (folder / "node-7.jsonl").symlink_to("/dev/stdin")
    os.mkfifo(folder / "rank-3.jsonl")
    (folder / "rank-4.jsonl").mkdir()
    began = time.monotonic()
    report = open_run([folder]).report(all_checks())
    assert time.monotonic() - began < 20
    assert max(r.steps for r in report.ranks) == 1


def test_findings_are_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = write_folder(tmp_path / "run", {0: steps(1)})
    (folder.path / "findings.json").symlink_to(victim)
    from ddpdoctor.storage.run_folder import write_private

    write_private(folder.findings_path, b"{}")
    assert victim.read_text() == "untouched"


def test_nothing_in_a_folder_is_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: [site(1, "evil.py", 1, "x"), *steps(1, site=1)]})
    for name in ("sitecustomize.py", "conftest.py", "evil.py", "__init__.py", "pyproject.toml"):
        (folder.path / name).write_text("open('ran', 'w').close()")
    subprocess.run(
        [sys.executable, "-m", "ddpdoctor", "report", "."],
        cwd=folder.path,
        env=inherited(PYTHONSAFEPATH="1"),
        capture_output=True,
        timeout=60,
    )
    assert not (folder.path / "ran").exists()


def test_secrets_are_hidden() -> None:
    from ddpdoctor.probe.recording.environment import interesting_environment, visible_arguments

    shown = interesting_environment(
        {
            "NCCL_DEBUG": "INFO",
            "TORCH_AUTH_TOKEN": "s3cret",
            "MASTER_ADDR": "redis://user:s3cret@host",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
            "WANDB_API_KEY": "s3cret",
        }
    )
    assert shown["NCCL_DEBUG"] == "INFO"
    assert "s3cret" not in repr(shown)
    words = [
        "--lr",
        "1",
        "--token",
        "s3cret",
        "--hf-token=s3cret",
        "db://u:s3cret@h",
        "PASSWORD=s3cret",
    ]
    assert "s3cret" not in repr(visible_arguments(words))
    assert visible_arguments(words)[:2] == ("--lr", "1")


def test_all_files_of_a_run_are_private(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os")
    command = [sys.executable, "-m", "ddpdoctor", "run", "--out", "run", "train.py"]
    os.umask(0o000)
    try:
        subprocess.run(command, cwd=tmp_path, env=inherited(), capture_output=True, timeout=100)
    finally:
        os.umask(0o022)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").rglob("*")}
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert {n for n, m in modes.items() if m & 0o077} == set()
    assert "findings.json" in modes
