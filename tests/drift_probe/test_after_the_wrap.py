"""Edits between the wrap and the first step: that they are seen, and which line made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from firing import alone

from ddpdoctor.probe.source.inplace_writes import inplace_statements
from ddpdoctor.probe.training import lifecycle
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.gradients.edits_after_wrap import EditsAfterWrap

HEAD = """
def init(m):
    nn.init.normal_(m.weight)

def batch():
    return torch.ones(2)

def main():
    model = DDP(net)
"""
TAIL = """
    out = model(x)
"""
WRAP = 9


def found(tmp_path: Path, body: str) -> list[str]:
    """The lines that may have edited parameters, of a body between a wrap and a forward."""
    path = tmp_path / "train.py"
    text = HEAD + body + TAIL
    path.write_text(text)
    module = compile(text, str(path), "exec")
    codes = [c for c in module.co_consts if isinstance(c, CodeType)]
    (main,) = (c for c in codes if c.co_name == "main")
    last = len(text.splitlines())
    lines = inplace_statements([(module, 99), (main, WRAP)], [(module, 99), (main, last)])
    return [text.splitlines()[line - 1].strip() for _, line in lines]


@pytest.mark.parametrize("body, line", [
    ("    model.apply(init)", "model.apply(init)"),
    ("    model.module.reset_parameters()", "model.module.reset_parameters()"),
    ("    if rank:\n        init(model)\n    opt.zero_grad()", "init(model)"),
    ("    with torch.no_grad():\n        for p in ps:\n            p -= 1", "p -= 1"),
    ("    for p in model.parameters():\n        p.data = p.data * 2", "p.data = p.data * 2"),
    ("    x = batch()\n    x.mul_(2)\n    if rank:\n        net.w.mul_(2)", "net.w.mul_(2)"),
])  # fmt: skip
def test_the_line_that_edits(tmp_path: Path, body: str, line: str) -> None:
    assert found(tmp_path, body) == [line]


@pytest.mark.parametrize("body", [
    "    x = 1",
    "    model.requires_grad_(True)\n    count += 1",
    "    if a:\n        net.w.mul_(2)\n    if b:\n        net.v.mul_(2)",
])  # fmt: skip
def test_no_line_is_better_than_a_wrong_one(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, body) == []


def test_where_the_functions_have_changed_between(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def build():\n    m = DDP(n)\n    m.n.reset_parameters()\nbuild()\ntrain()\n")
    module = compile(path.read_text(), str(path), "exec")
    build = next(c for c in module.co_consts if isinstance(c, CodeType))
    assert inplace_statements([(module, 4), (build, 2)], [(module, 5)]) == [(build, 3)]
    assert inplace_statements([(module, 4), (build, 2)], [(module, 4)]) == [(build, 3)]


ROUNDS = """def train():
    net.reset_parameters()
    for step in range(9):
        net.v.data = first
        forward()
        step()
        if rank == 0:
            ema.update()
    net.w.mul_(2)
class EMA:
    def update(self):
        with torch.no_grad():
            p.copy_(e)
"""


@pytest.mark.parametrize(
    ("begin", "end", "told"), [(6, 6, []), (6, 5, []), (5, 6, []), (4, 4, [8]), (6, 4, [8])]
)
def test_what_is_between_two_lines_of_a_round_is_not_beyond_the_loop(
    tmp_path: Path, begin: int, end: int, told: list[int]
) -> None:
    """From a step to the next one: line 4 and line 8, of which it is not known which it was."""
    path = tmp_path / "train.py"
    path.write_text(ROUNDS)
    codes = compile(ROUNDS, str(path), "exec").co_consts
    train = next(c for c in codes if isinstance(c, CodeType) and c.co_name == "train")
    found = inplace_statements([(train, begin)], [(train, end)])
    assert [line for _, line in found] == told


def steps_after(
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Any], object],
    between: Callable[[Any], object] | None = None,
) -> list[Any]:
    """What is told of a model that is edited between its wrap and its first two steps; `between`
    edits it before a second forward of the first step, and is taken back after it."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    model: Any = SimpleNamespace(
        number=0,
        parameters=[weakref.ref(p) for p in parameters],
        ignored=set(),
        names=["one", "two", "three"],
        inner=lambda model: None,
    )
    model = type("Model", (), vars(model))()
    told: list[Any] = []
    sites = SimpleNamespace(
        kind=lambda code: "user",
        number=lambda code, line: line,
        user_lines=lambda frame, most: [],
    )
    recorder: Any = SimpleNamespace(emit=told.append, sites=sites)
    holding = SimpleNamespace(model=model, optimizer=0)
    step: Any = SimpleNamespace(holdings=[holding], number=0)
    alone(monkeypatch, EditsAfterWrap)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    lifecycle.wrapped.fire(recorder, model)
    edit(parameters[2])
    forward: Any = SimpleNamespace(model=model)
    lifecycle.forward_begins.fire(recorder, forward)
    if between is not None:
        before = parameters[1].detach().clone()
        between(parameters[1])
        lifecycle.forward_begins.fire(recorder, forward)
        parameters[1].data.copy_(before)
    lifecycle.step_begins.fire(recorder, step)
    edit(parameters[2])
    lifecycle.step_begins.fire(recorder, step)
    return told


def test_an_edit_is_told_and_is_over_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told = steps_after(monkeypatch, lambda p: p.data.zero_())
    assert [(e.step, e.changed) for e in told] == [(0, True), (1, False)]
    assert not steps_after(monkeypatch, lambda p: p.data.mul_(1))


def test_what_is_put_back_before_the_step_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    told = steps_after(monkeypatch, lambda p: None, lambda p: p.data.add_(1))
    assert [(e.step, e.changed, e.undone) for e in told] == [(0, False, True), (1, False, False)]
    told = steps_after(monkeypatch, lambda p: p.data.zero_(), lambda p: p.data.add_(1))
    assert [(e.changed, e.undone) for e in told] == [(True, False), (False, False)]
