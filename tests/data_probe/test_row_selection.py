"""What may select among gathered rows, by the source of the functions that are running."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any
from unittest import mock

import pytest

from ddpdoctor.probe.source import row_selection
from ddpdoctor.probe.source.row_selection import may_select

PROGRAM = """
import functools

class Score:
    def __init__(self):
        self.rows = []

    def update(self, rows):
        self.rows.append(rows)

    def value(self):
        return {value}

def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

@wrapped
def first():
    return [n for n in range(9) if n][:3]

def evaluate(gather, names, n, loader):
    score, results, key = Score(), {{}}, "accuracy"
    before = names[:2]
    for batch in loader:
        if n > 7:
            print(batch["x"], names[-1])
        rows = gather(batch)
        {loop}
        score.update(rows)
    {after}
    return score.value()

def main(gather):
    first()
    for epoch in range(2):
        evaluate(gather, ["a", "b", "c"], 3, [[1], [2]])
"""


def judged(tmp_path: Any, *, loop: str = "pass", after: str = "pass", value: str = "1") -> bool:
    """Whether a program of these statements may select among the rows it gathers."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(loop=loop, after=after, value=value))
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    found: list[bool] = []

    def kind(code: CodeType) -> str:
        return "user" if code.co_filename == str(file) else "own"

    def gather(rows: Any) -> Any:
        found.append(may_select(sys._getframe(), kind))
        return rows

    with mock.patch.object(row_selection, "own_files", lambda: [str(file)]):
        names["main"](gather)
    assert found == [found[0]] * 4
    return found[0]


@pytest.mark.parametrize(
    "statements",
    [
        {},
        {"after": "best = max(n, len(loader))"},
        {"loop": "results[key] = rows[0]"},
        {"loop": "rows = [r > 0.5 for r in rows]", "value": "sum(self.rows, [])"},
        {"loop": "results[key] = n", "after": "print(results[key])"},
    ],
)
def test_rows_that_are_used_as_they_are(tmp_path: Any, statements: dict[str, str]) -> None:
    assert not judged(tmp_path, **statements)


@pytest.mark.parametrize(
    "statements",
    [
        {"loop": "rows = rows[: n - 4]"},
        {"after": "score.rows = score.rows[n:9]"},
        {"value": "self.rows[:3]"},
        {"after": "first()"},
        {"loop": "rows = [r for r in rows if r]"},
        {"loop": "results.update({r: 1 for r in rows})"},
        {"loop": "rows = rows[n - 3]"},
        {"after": "set(map(str, score.rows))"},
        {"loop": "valid = rows and rows[0] < n"},
        {"after": "results['made'].value() if n < 0 else 0", "value": "self.rows[:3]"},
        {"loop": "if rows[0] < n: continue"},
        {"loop": "for each in [score]: each.update([1])", "value": "self.rows[:3]"},
    ],
)
def test_rows_that_may_be_dropped(tmp_path: Any, statements: dict[str, str]) -> None:
    assert judged(tmp_path, **statements)


def test_a_function_of_a_library_that_takes_the_first_rows() -> None:
    def gather_for_metrics(rows: Any, remainder: int = 3) -> bool:
        return may_select(sys._getframe(), library) and bool(rows[:remainder])

    def gather(rows: Any) -> bool:
        return may_select(sys._getframe(), library)

    def library(code: CodeType) -> str:
        return "library" if code.co_name.startswith("gather") else "own"

    assert gather_for_metrics([1])
    assert not gather([1])
