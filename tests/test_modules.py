"""Where modules and parameters were made."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe import modules, patching


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        modules._note(self, sys._getframe())
        self.base = base
        self.scale = nn.Parameter(torch.ones(1))


def test_what_brought_in_a_parameter_that_the_model_did_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def number(code: Any, line: int) -> int:
        return line

    active = SimpleNamespace(sites=SimpleNamespace(number=number))
    monkeypatch.setattr(modules, "recorder", lambda: active)
    monkeypatch.setattr(modules._births, "is_user", lambda code: code.co_filename == __file__)
    hooked = nn.modules.module.register_module_parameter_registration_hook(modules._registered)
    made = Adapter(nn.Linear(2, 2))
    assert modules.added_site(made, "scale") == line_of("made = Adapter")
    made.later = nn.Parameter(torch.ones(1))
    hooked.remove()
    assert modules.added_site(made, "later") == line_of("made.later =")


def test_copies_are_known_though_no_constructor_makes_them() -> None:
    modules.install()
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        copied = copy.deepcopy(model)
        unpickled = pickle.loads(pickle.dumps(model))
        held = [*copied.parameters(), *unpickled.parameters()]
        names, roots = modules.named_roots(held)
        assert [names[id(p)] for p in held] == ["0.weight", "0.bias"] * 2
        assert {id(m) for m in roots} == {id(copied), id(unpickled)}
        assert all(modules.in_some_module(p) for p in held)
    finally:
        patching.restore()
