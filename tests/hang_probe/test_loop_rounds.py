"""How many rounds loops have is told from the values of their variables."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.events import Statement
from ddpdoctor.probe.source.loop_rounds import rounds

EPOCHS = 7


class Sly:
    @property
    def epochs(self) -> int:
        raise AssertionError("the user's code was run")


class Lying(list[int]):
    def __len__(self) -> int:
        raise AssertionError("the user's code was run")


def told(text: str, **known: Any) -> dict[int, int]:
    head = Statement(line=3, text=text, kind="for")
    args, sly, names = SimpleNamespace(epochs=5), Sly(), known
    batches, lying = [(1, 2)] * 3, Lying([1, 2])
    frame = sys._getframe()
    assert args and sly and batches and type(lying) is Lying and names is not None
    return rounds([head], frame)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("for epoch in range(EPOCHS):", 7),
        ("for epoch in range(args.epochs):", 5),
        ("for epoch in range(2, args.epochs + 1):", 4),
        ("for n in range(0, 10, 3):", 4),
        ("for x, y in batches:", 3),
        ("for n, (x, y) in enumerate(batches):", 3),
        ("for n in enumerate(range(4)):", 4),
    ],
)
def test_rounds_are_told_by_values(text: str, count: int) -> None:
    assert told(text) == {3: count}


@pytest.mark.parametrize(
    "text",
    [
        "for epoch in range(unknown):",
        "for epoch in range(sly.epochs):",
        "for epoch in range(len(args)):",
        "for epoch in range(args):",
        "for n in range(0, 10, 0):",
        "for x, y in loader:",
        "for x in lying:",
        "for epoch in range(",
        "for epoch in range(*args):",
    ],
)
def test_nothing_of_the_users_is_run_for_it(text: str) -> None:
    assert told(text) == {}
