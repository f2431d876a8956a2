"""Where modules and parameters were made."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.weak_references import WeakIdentityMap
from ddpdoctor.probe.training import module_origins
from ddpdoctor.probe.training.module_origins import ModuleOrigins


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        ModuleOrigins.current._record_origin(self, sys._getframe())
        self.base = base
        self.scale = nn.Parameter(torch.ones(1))


def test_what_brought_in_a_parameter_that_the_model_did_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def number(code: Any, line: int) -> int:
        return line

    recorder = SimpleNamespace(sites=SimpleNamespace(number=number))
    monkeypatch.setattr(module_origins, "current_recorder", lambda: recorder)
    monkeypatch.setattr(ModuleOrigins.current, "is_user", lambda code: code.co_filename == __file__)
    hooked = nn.modules.module.register_module_parameter_registration_hook(
        ModuleOrigins.current._registered
    )
    made = Adapter(nn.Linear(2, 2))
    assert ModuleOrigins.current.added_site(made, "scale") == line_of("made = Adapter")
    made.later = nn.Parameter(torch.ones(1))
    hooked.remove()
    assert ModuleOrigins.current.added_site(made, "later") == line_of("made.later =")


def test_copies_are_known_though_no_constructor_makes_them() -> None:
    ModuleOrigins.begin()
    try:
        model = nn.Sequential(nn.Linear(2, 2))
        copied = copy.deepcopy(model)
        unpickled = pickle.loads(pickle.dumps(model))
        held = [*copied.parameters(), *unpickled.parameters()]
        names, roots = ModuleOrigins.current.named_roots(held)
        assert [names[id(p)] for p in held] == ["0.weight", "0.bias"] * 2
        assert {id(m) for m in roots} == {id(copied), id(unpickled)}
        assert all(ModuleOrigins.current.in_some_module(p) for p in held)
    finally:
        patching.restore()


class Fussy(nn.Module):
    """Its hash needs what its constructor has yet to set, and changes; it has no equality."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [0]

    def __hash__(self) -> int:
        return hash(tuple(self.state))

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")


def test_a_module_is_known_by_what_it_is_whatever_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    missed: list[Exception] = []
    monkeypatch.setattr(ModuleOrigins.current, "_missed", missed.append)
    monkeypatch.setattr(ModuleOrigins.current, "is_user", lambda code: code.co_filename == __file__)
    ModuleOrigins.begin()
    try:
        made = Fussy()
        made.state = [1]
        assert ModuleOrigins.current.origin_line(made) is not None
        assert any(module is made for module in ModuleOrigins.current.living_modules())
        number = len(ModuleOrigins.current.living_modules())
        del made
        gc.collect()
        assert len(ModuleOrigins.current.living_modules()) < number, "it is kept alive"
    finally:
        patching.restore()
    assert missed == []


def test_a_map_by_identity() -> None:
    known: WeakIdentityMap[int] = WeakIdentityMap()
    one, other = Fussy(), Fussy()
    known[one] = 1
    assert (known.get(one), known.get(other), known.get(other, 5)) == (1, None, 5)
    assert one in known and other not in known
    known[one] = 2
    assert [value for _, value in known.items()] == [2]
    assert known.pop(one) == 2
    assert len(known) == 0
    known[other] = 3
    del other
    gc.collect()
    assert len(known) == 0
