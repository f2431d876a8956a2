"""The line that an exception is about."""

from __future__ import annotations

import bdb
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.source.exception_lines import pointed_at

STOPPED = """
import bdb

def forward(x):
    if x > 6:
        breakpoint()
    raise bdb.BdbQuit

def looping(rows):
    for row in rows:
        if row:
            raise bdb.BdbQuit
        import pdb; pdb.set_trace()

def mine(x):
    raise bdb.BdbQuit

def other(x):
    raise ValueError
"""


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "given", "line"),
    [("forward", 7, 6), ("looping", [0, 1], 13), ("mine", 1, 16), ("other", 1, None)],
)
def test_the_breakpoint_before_the_line_in_which_the_debugger_quit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    given: object,
    line: int | None,
) -> None:
    monkeypatch.setattr("sys.breakpointhook", lambda: None)
    monkeypatch.setattr("pdb.set_trace", lambda: None)
    file = tmp_path / "net.py"
    file.write_text(STOPPED)
    names: dict[str, Callable[[object], object]] = {}
    exec(compile(STOPPED, str(file), "exec"), names)  # type: ignore[arg-type]
    error = raised_by(lambda: names[function](given))
    place = pointed_at(Sites(lambda event: None), error)
    assert place == ((str(file), line, function) if line else None)


def test_a_text_that_is_no_python(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import torch\n\ndef main(:\n")
    text = file.read_text()
    sites = Sites(lambda event: None)
    assert pointed_at(sites, raised_by(lambda: compile(text, str(file), "exec"))) == (
        str(file),
        3,
        "",
    )
    assert pointed_at(sites, raised_by(lambda: compile(text, "<string>", "exec"))) is None
    assert pointed_at(sites, raised_by(lambda: compile(text, "gone.py", "exec"))) is None
    assert pointed_at(sites, bdb.BdbQuit()) is None
