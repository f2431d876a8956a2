"""Flags that are set again and again, as GANs do between their two backwards."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.source.call_resolver import Found, setting_in_frames
from ddpdoctor.probe.source.dead_branches import call_under_condition, never_runs
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.graph import changes_after_wrap
from ddpdoctor.probe.watchers.graph.changes_after_wrap import ChangesAfterWrap

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "Parameter indices which did not receive grad for rank 0: {}\n In addition"
)


NOBODY: Any = None
"""The recorder: nothing is told."""


@pytest.fixture
def model() -> tuple[nn.Module, Model]:
    ChangesAfterWrap.current._watches.clear()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made = Model(0, module, list(module.parameters()), [0, 1, 2, 3])
    made.names = [name for name, _ in module.named_parameters()]
    made.trainable = [True] * 4
    return module, made


def forward(model: Model, error: str = "") -> Any:
    return SimpleNamespace(
        model=model, site=7, grad_enabled=True, sync=True, error=RuntimeError(error)
    )


def look(model: Model) -> None:
    ChangesAfterWrap.current._look_at_flags(
        NOBODY, forward(model), ChangesAfterWrap.current._watches[model]
    )


def test_the_line_is_looked_for_once(
    model: tuple[nn.Module, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(
        ChangesAfterWrap.current, "_flag_site", lambda *given: looked.append(given) or 5
    )
    module, made = model
    for _ in range(6):
        module.requires_grad_(False)
        look(made)
        assert [c.site for c in ChangesAfterWrap.current._watches[made].found] == [5]
        module.requires_grad_(True)
        look(made)
        assert not ChangesAfterWrap.current._watches[made].found
    assert len(looked) == 1


@pytest.mark.parametrize(("without", "told"), [("3", []), ("0 1 2 3", ["frozen"])])
def test_what_had_a_gradient_was_frozen_later(
    model: tuple[nn.Module, Model], monkeypatch: pytest.MonkeyPatch, without: str, told: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(ChangesAfterWrap.current, "_flag_site", lambda *given: 5)
    monkeypatch.setattr(
        changes_after_wrap, "_emit", lambda a, m, w, change, **more: found.append(change.kind)
    )
    module, made = model
    module.requires_grad_(False)
    ChangesAfterWrap.current._forward_failed(NOBODY, forward(made, UNFINISHED.format(without)))
    assert found == told


def _set(module: nn.Module, on: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(on)


def _program(flag: bool) -> tuple[Found | None, int]:
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    code = _program.__code__
    _set(net, False)
    _set(net, True)
    wrapped = Found(code, code.co_firstlineno + 4)
    noisy = x.clone().requires_grad_(True)
    x.requires_grad_(True)
    noisy.requires_grad_(False)
    _set(net, True)
    _set(net, False)
    ours = (code, _set.__code__)
    frame = sys._getframe()
    found = setting_in_frames(frame, lambda c: c in ours, "requires_grad", flag, after=wrapped)
    return found, code.co_firstlineno


@pytest.mark.parametrize(("flag", "line"), [(True, 9), (False, 10)])
def test_the_line_that_sets_the_parameters_after_the_wrap(flag: bool, line: int) -> None:
    """Not one before it, nor of an input, nor the helper that does as it is told."""
    found, first = _program(flag)
    assert found is not None
    assert found.line == first + line


def _freeze(net: nn.Module, on: bool = False) -> None:
    for parameter in net.parameters():
        parameter.requires_grad = on


def test_the_line_that_calls_a_function_of_a_library() -> None:
    """The last one before the line that is executing; `_freeze` is not the user's here."""
    net = nn.Linear(2, 2)
    code = sys._getframe().f_code
    _freeze(net)
    _freeze(net)
    found = setting_in_frames(sys._getframe(), lambda c: c is code, "requires_grad", False)
    _freeze(net)
    assert found == Found(code, code.co_firstlineno + 5)
    assert setting_in_frames(sys._getframe(), lambda c: c is code, "requires_grad", True) is None


def test_the_line_that_calls_a_function_which_does_so_by_default() -> None:
    net = nn.Linear(2, 2)
    code = sys._getframe().f_code
    _freeze(net)
    ours = (code, _freeze.__code__)
    found = setting_in_frames(sys._getframe(), lambda c: c in ours, "requires_grad", False)
    assert found == Found(code, code.co_firstlineno + 3)


HOW = "late"


def _in_branches(model: nn.Sequential) -> int | None:
    """Where it is thawed, as far as that can be told: lines after that of this function."""
    code = _in_branches.__code__
    if HOW == "early":
        _set(model, True)
    elif HOW == "late":
        _set(model[0], True)
    ours = (code, _set.__code__)
    found = setting_in_frames(sys._getframe(), lambda c: c in ours, "requires_grad", True)
    return found.line - code.co_firstlineno if found else None


def _in_unknown_branches(model: nn.Sequential) -> Found | None:
    if model.training:
        _set(model, True)
    else:
        _set(model[0], True)
    ours = (_in_unknown_branches.__code__, _set.__code__)
    return setting_in_frames(sys._getframe(), lambda c: c in ours, "requires_grad", True)


def test_of_lines_in_several_branches_only_one_that_ran() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert _in_branches(model) == 6
    assert _in_unknown_branches(model) is None


@pytest.mark.parametrize(
    ("test", "never"),
    [
        ("HOW == 'late'", {8}),
        ("HOW in ('early', 'soon')", {6}),
        ("not (HOW != 'late')", {8}),
        ("args.how == 'late'", {8}),
        ("args.stage == 1", set()),  # it is given another value later
        ("done", set()),
        ("HOW == other", set()),
        ("phase == 1", set()),  # in a loop
    ],
)
def test_conditions_that_cannot_have_changed(test: str, never: set[int], tmp_path: Any) -> None:
    program = f"""HOW, done = "late", False
for phase in (1, 2): pass
def run(args, other):
    global done
    if {test}:
        first()

    else: second()
    args.stage = done = 2
"""
    file = tmp_path / "program.py"
    file.write_text(program)
    names: dict[str, Any] = {"args": argparse.Namespace(how="late", stage=2), "other": "late"}
    exec(compile(program, str(file), "exec"), names)
    code = names["run"].__code__
    assert {n for n in (6, 8) if never_runs(code, n, names.get)} == never


@pytest.mark.parametrize(("body", "found"), [
    ("if args.ddp:\n    dist.init()", (2, "if args.ddp:")),
    ("if not args.ddp:\n    pass\nelse:\n    dist.init()", (4, "else:  # if not args.ddp:")),
    ("def start():\n    if cuda:\n        init(1)", (3, "if cuda:")),
    ("dist.init()", None),
    ("if not dist.is_initialized():\n    dist.init()", None),
    ("if __name__ == '__main__':\n    init()", None),
    ("if args.ddp:\n    other()", None),
])  # fmt: skip
def test_a_call_and_its_condition(tmp_path, body, found):
    (tmp_path / "train.py").write_text(body + "\n")
    assert call_under_condition(str(tmp_path / "train.py"), "init") == found
