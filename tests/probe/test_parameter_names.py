"""Names of parameters, as loops over them are told apart by."""

from __future__ import annotations

import torch
from torch import nn

from ddpdoctor.probe.training.module_origins import ModuleOrigins


class Touchy:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the program's own code is called for {name}")


def test_names_of_parameters() -> None:
    origins = ModuleOrigins()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    for module in (model, *model):
        origins.lines[module] = test_names_of_parameters.__code__, 1
    assert origins._name_of(model[1].weight) == "1.weight"
    assert origins._name_of(model[0].bias) == "0.bias"
    for other in (torch.zeros(1), Touchy(), 7, None, "0.bias"):
        assert origins._name_of(other) == ""
