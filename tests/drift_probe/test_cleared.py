"""The statement that clears gradients between a backward and a step, read off the source."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.watchers.gradients.gradient_clears import clearing_line

DEBUG = "DEBUG = False"


def line_of(tmp_path: Path, between: str, *, after: int = 3) -> int:
    """What is found by a step on the last line, of a function whose backward is on the third."""
    path = tmp_path / "train.py"
    inside = "\n".join(f"    {line}" for line in between.splitlines())
    path.write_text(
        f"{DEBUG}\ndef train(model, opt, step):\n    pass\n{inside}\n    return step()\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    def step() -> int:
        return clearing_line(sys._getframe(1), after)

    class Anything:
        grad = None

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: []

    found: int = names["train"](Anything(), Anything(), step)
    return found


@pytest.mark.parametrize("statement", [
    "for p in model.parameters(): p.grad.zero_()",
    "for p in model.parameters(): p.grad.data.fill_(0.0)",
    "for p in model.parameters(): p.grad = None",
    "for p in model.parameters(): p.grad = torch.zeros_like(p)",
    "opt.zero_grad(set_to_none=True)",
])  # fmt: skip
def test_the_only_one_is_it(tmp_path: Path, statement: str) -> None:
    assert line_of(tmp_path, f"x = 1\n{statement}") == 5


@pytest.mark.parametrize("between", [
    "for p in model.parameters(): p.grad.mul_(0.5)",
    "for p in model.parameters(): p.data.zero_()",
    "for p in model.parameters(): p.grad.fill_(1.0)",
    "for p in model.parameters(): p.grad = p.kept",
    "if DEBUG:\n    opt.zero_grad()",
    "opt.zero_grad()\nmodel.zero_grad()",
])  # fmt: skip
def test_others_are_not(tmp_path: Path, between: str) -> None:
    assert line_of(tmp_path, between) == -1


def test_before_the_backward_or_where_that_is_elsewhere(tmp_path: Path) -> None:
    assert line_of(tmp_path, "opt.zero_grad()\nx = 1", after=4) == -1
    assert line_of(tmp_path, "opt.zero_grad()", after=-1) == -1
