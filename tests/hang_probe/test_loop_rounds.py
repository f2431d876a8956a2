"""How many rounds loops have is told from the values of their variables."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    x, empty, scalar, plain = torch.ones(10, 2), torch.ones(0), torch.ones(()), "a,b"
    assert len(x) == 10 and not len(empty) and scalar and plain
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
        ("for n in range(0, len(x), 3):", 4),
        ("for n in range(len(batches) * 2 // 4):", 1),
        ("for row in x:", 10),
        ("for part in x.split(4):", 3),
        ("for part in x.chunk(6):", 5),
        ("for part in torch.randperm(len(x)).split(args.epochs):", 2),
        ("for i in torch.randperm(len(x), device=device):", 10),
        ("for i, j in zip(x, range(3)):", 3),
        ("for k, v in names.items():", 0),
        ("for x in [make() for _ in range(3)]:", 3),
        ("for n in tqdm(range(4), disable=True):", 4),
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
        "for x in scalar:",
        "for part in plain.split(2):",
        "for part in x.split(2, dim=1):",
        "for part in x.split([2, 8]):",
        "for part in empty.split(0):",
        "for i in zip(batches, loader):",
        "for x in [x for x in batches if x]:",
        "for x in range(4 // 0):",
        "for epoch in range(",
        "for epoch in range(*args):",
    ],
)
def test_nothing_of_the_users_is_run_for_it(text: str) -> None:
    assert told(text) == {}
