"""`ddpdoctor run` and `exec`: what they hand over to the launcher, what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import Caught, refused

from ddpdoctor import launch
from ddpdoctor.cli import main
from ddpdoctor.config import Options


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Options, list[str]]]:
    """What would have been launched; the launch itself ends with 7."""
    calls: list[tuple[Options, list[str]]] = []

    def record(options: Options, words: list[str]) -> int:
        calls.append((options, words))
        return 7

    monkeypatch.setattr(launch, "run", record)
    monkeypatch.setattr(launch, "exec_command", record)
    return calls


def test_run_hands_over(launched: list[tuple[Options, list[str]]], somewhere: Path) -> None:
    (somewhere / "train.py").touch()
    line = "run --nnodes 1 --every 5 --fail-on error train.py --json x"
    assert main(line.split()) == 7
    ((options, words),) = launched
    assert options == Options(every=5, fail_on="error")
    assert words == ["--nnodes", "1", "train.py", "--json", "x"]


def test_run_takes_modules_and_programs(launched: list[tuple[Options, list[str]]]) -> None:
    assert main(["run", "-m", "pkg.train"]) == 7
    assert main(["run", "--no-python", "prog"]) == 7
    assert len(launched) == 2


def test_exec_hands_over(launched: list[tuple[Options, list[str]]]) -> None:
    assert main(["exec", "--quiet", "--", sys.executable, "a.py", "--quiet"]) == 7
    assert launched == [(Options(quiet=True), [sys.executable, "a.py", "--quiet"])]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run", "no script to run"),
        ("run --standalone", "no script to run"),
        ("run nope.py", "no such script: nope.py"),
        ("run pkg", "type -m before it"),
        ("run .", "is a folder"),
        ("run --select nothing setup.py", "no check is called 'nothing'"),
        ("run --ignore DDP9,zz setup.py", "no check is called 'zz'"),
        ("run --budget lots setup.py", "--budget: 'lots' is not"),
        ("exec", "no command to run"),
        ("exec -- no-such-program-here", "no such program"),
    ],
)
def test_run_refuses(
    line: str,
    expected: str,
    capsys: Caught,
    somewhere: Path,
    launched: list[tuple[Options, list[str]]],
) -> None:
    (somewhere / "setup.py").touch()
    assert expected in refused(capsys, *line.split())
    assert not launched
