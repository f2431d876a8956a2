"""`ddpdoctor watch`."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from commands import Caught, refused
from recordings import started, steps, write_folder

from ddpdoctor.cli import main


def test_watch_without_a_terminal_prints_once(tmp_path: Path, capsys: Caught) -> None:
    mine = {"pid": os.getpid(), "node": platform.node(), "wall": time.time(), "at": 0.0}
    there = {r: [started(r, 2, **mine), *steps(3 - r)] for r in range(2)}
    folder = write_folder(tmp_path / "run", there, ended=None).path
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: running, 2 ranks" in out
    assert "0     running      3" in out
    assert "1     running      2" in out


def test_watch_tells_a_run_that_is_gone(tmp_path: Path, capsys: Caught) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3), 1: steps(2)}, ended=None).path
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: incomplete, 2 ranks" in out
    assert "0     lost       3" in out
    assert "no such folder" in refused(capsys, "watch", tmp_path / "nope")


def test_watch_expects_no_more_of_a_run_that_is_over(tmp_path: Path, capsys: Caught) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(3)}, world_size=2).path
    assert main(["watch", str(folder)]) == 0
    assert "no record of rank 1" in capsys.readouterr().out
