"""Which parameters of a large model are watched for edits by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.gradients.watched_parameters import (
    named_where_written,
    only_place,
    to_watch,
)


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.codes = torch.nn.Embedding(2, 2)
        self.last = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20))


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("model.module.scale.data.clamp_(0, 2.6)", ["scale"]),
        ("inner(model).scale.clamp_(0, 2.6)", ["scale"]),
        ("self.scale.grad.mul_(2)", ["scale"]),
        ("scale = model.module.scale.item()", []),
        ("net.codes.weight.data[0] = 0", ["codes.weight"]),
        ("self.model.codes.weight.data = new", ["codes.weight"]),
        ("layer.weight.data.mul_(2)", []),
        ("layer.weight.requires_grad_(False)", []),
    ],
)
def test_parameters_that_the_source_names_where_it_writes(
    tmp_path: Path, statement: str, named: list[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"def train(self, model, inner, net, layer, new):\n    {statement}\n")
    code = compile(file.read_text(), str(file), "exec")
    module = Tower()
    parameters = dict(module.named_parameters())
    model = Model(0, module, list(parameters.values()), list(range(len(parameters))))
    model.names = list(parameters)
    found = named_where_written(model, [(code, 1)])
    assert [model.names[p] for p in found] == named
    assert only_place(found, found) == ((str(file), 2, "train") if named else None)
    assert only_place(found, [*found, 40]) is None  # which is not named
    assert {*found} <= {*to_watch(range(len(parameters)), found)}


def test_a_few_parameters_are_watched_whatever_the_source_says() -> None:
    every: Any = range(1000)
    assert len(to_watch(every)) == len(to_watch(every, [5])) - 1
