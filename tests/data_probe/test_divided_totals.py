"""Which sums of a loop are divided by the length of a data set."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from ddpdoctor.probe.source.division import totals_divided


def code_of(path: Path, body: str) -> CodeType:
    text = "def evaluate(loader, dataset, model):\n" + "".join(
        f"    {x}\n" for x in body.split("\n")
    )
    path.write_text(text)
    scope: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), scope)
    found: CodeType = scope["evaluate"].__code__
    return found


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ("return right / len(loader.dataset)", [("right", "loader.dataset")]),
        ("return 100.0 * right / len(dataset)", [("right", "dataset")]),
        ("right /= len(dataset)", [("right", "dataset")]),
        ("size = len(dataset)\nprint(right / size)", [("right", "dataset")]),
        ("return right / seen", []),
        ("right = all_reduce_sum(right)\nreturn right / len(dataset)", []),
        ("dist.all_reduce(right)\nreturn right / len(dataset)", []),
        ("return other / len(dataset)", []),
    ],
)
def test_sums_that_are_divided(tmp_path: Path, after: str, found: list[tuple[str, str]]) -> None:
    loop = "right = seen = other = 0\nfor x, y in loader:\n    right += model(x, y)\n    seen += 1"
    code = code_of(tmp_path / f"made{sys.version_info.minor}.py", f"{loop}\n{after}")
    told = totals_divided(code, 3)
    assert [(d.total, ast.unparse(d.of)) for d in told] == found
