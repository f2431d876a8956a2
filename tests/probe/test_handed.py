"""Whether a function hands on what it was given, from its text alone."""

from pathlib import Path
from types import CodeType

import pytest
import torch.distributed  # noqa: F401

from ddpdoctor.probe.source.passthrough import passes_through

HEAD = "import torch, torch.distributed as dist\nSUM = dist.ReduceOp.SUM\nsizes = [1]\n"
GIVEN = [
    "def f(t):\n    call(t)",
    "def f(t):\n    t = t.detach().clone()\n    call(t, op=dist.ReduceOp.SUM)\n    t /= size()",
    "def f(v, device):\n    x: torch.Tensor = torch.tensor([v], device=device)\n    call(x, SUM)",
    "def f(t, src_rank):\n    return [\n        call(\n            t,\n            src_rank)]",
    "def f(*args, **kwargs):\n    return call(*args, **kwargs)",
    "class A:\n    def f(self, t):\n        call(t, group=self.group)",
    "class A:\n    @staticmethod\n    def f(t):\n        call(t)",
    "if sizes:\n    def f(s, t):\n        call(s)",
    "def f(v):\n    call(torch.tensor([float(v)]))",
    "def f(t):\n    call(t.sum())",
    "def f(figures, name):\n    call(figures[name])",
    "def f(n):\n    x = n\n    x += 1\n    call(torch.zeros(x))",
]
OWN = [
    "def f():\n    t = torch.ones(1)\n    call(t)",
    "def f(t):\n    call(torch.ones(3))",
    "class A:\n    def f(self):\n        call(self.total)",
    "class A:\n    def f(self, scale):\n        call(scale * self.total)",
    "class A:\n    def f(this):\n        call(torch.ones(len(this.seen)))",
    "class A:\n    n = 1\n\n# Its sum.\n    def f(s):\n        t = s.total; call(t)",
    "def f(model):\n    for p in model.parameters():\n        call(p.grad)",
    "def f(t, rank):\n    call(t if rank else t[1:])",
    "def f(t):\n    call(t[dist.get_rank():])",
    "def f(t):\n    call(t, src=dist.get_rank())",
    "def f(t):\n    call(t, src=sizes[0])",
    "def f(t):\n    n, m = t.shape\n    call(t[:n])",
    "def f(batches):\n    call(torch.stack([b for b in batches]))",
    "def f(t):\n    with lock() as held:\n        call(held)",
    "def f(t):\n    def g():\n        call(t)\n    g()",
    "def f(t):\n    other(t); call(torch.ones(1))",
    "def f(v):\n    t = torch.tensor([sum(v), len(v)])\n    call(t)",
    "def f(t, mask):\n    kept = t[mask.bool()].float()\n    call(kept)",
    "def f(t, mask):\n    call(t.masked_select(mask))",
]


def functions(code: CodeType) -> list[CodeType]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    found = [c for i in inner for c in functions(i)]
    return found if code.co_name.startswith("<") else [code, *found]


@pytest.mark.parametrize("name", ["all_reduce", "helper"])
@pytest.mark.parametrize("text", [*GIVEN, *OWN])
def test_what_a_function_hands_on(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "helper.py"
    path.write_text(HEAD + text.replace("call(", f"{name}("))
    line = next(n for n, t in enumerate(path.read_text().splitlines(), 1) if f"{name}(" in t)
    every = functions(compile(path.read_text(), str(path), "exec"))
    code = max((c for c in every if c.co_firstlineno <= line), key=lambda c: c.co_firstlineno)
    called = None if name == "all_reduce" else code.replace(co_name=name)
    assert passes_through(code, line, called) is (text in GIVEN)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("def f(group):\n    return dist.new_group(sorted(group))", True),
        ("def f(a, b):\n    return dist.new_group([a, b])", True),
        ("def f(r):\n    return dist.new_group([r - 1, r])", False),
        ("def f(r):\n    pair = r // 2\n    return dist.new_group([pair, r])", False),
    ],
)
def test_ranks_of_a_group_that_are_computed_there(tmp_path: Path, text: str, given: bool) -> None:
    path = tmp_path / "helper.py"
    path.write_text(HEAD + text)
    code = functions(compile(path.read_text(), str(path), "exec"))[-1]
    assert passes_through(code, len(path.read_text().splitlines()), None) is given


def test_without_its_source() -> None:
    code = compile("def f(t):\n    call(t)", "<made>", "exec").co_consts[0]
    assert not passes_through(code, 2, None)
