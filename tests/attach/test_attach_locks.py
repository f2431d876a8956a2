"""Which locks a line of a program holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.attach.locks import held, same, waited_for
from ddpdoctor.attach.records import Frame

CODE = """\
def save(self):
    with self.lock, open("x") as file:
        write(file)
        def later():
            work()
    again()

def hold():
    lock.acquire()
    work()
    lock.release()
    rest()

with outer:
    call()
"""


@pytest.mark.parametrize(("line", "expected"), [
    (2, ()), (3, ("self.lock",)), (5, ()), (6, ()), (9, ()), (10, ("lock",)), (12, ()),
    (15, ("outer",)),
])  # fmt: skip
def test_what_is_held(tmp_path: Path, line: int, expected: tuple[str, ...]) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    assert held([Frame("f", str(path), line)]) == expected


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def (:\n")
    assert held([Frame("f", str(path), 1), Frame("f", "/nowhere.py", 3)]) == ()


@pytest.mark.parametrize(("source", "expected"), [
    ("with lock:", "lock"), ("with self.locks[i] as x:", "self.locks[i]"),
    ("if not lock.acquire(timeout=9):", "lock"), ("with open(path):", ""), ("f(lock)", ""),
])  # fmt: skip
def test_what_a_line_waits_for(source: str, expected: str) -> None:
    assert waited_for(source) == expected


def test_one_lock_has_several_names() -> None:
    assert same("self.lock", "saver.lock") and not same("lock", "other")
