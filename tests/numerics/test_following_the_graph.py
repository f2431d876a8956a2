"""A loss that is not finite is followed back through the autograd graph."""

from __future__ import annotations

import importlib
import linecache
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("operation", ["log", "div", "sqrt", "exp"])
def test_followed_through_a_graph(operation: str) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    out = model(torch.ones(2, 4))
    made = {
        "log": lambda x: torch.log(x * 0),
        "div": lambda x: 1 / (x * 0),
        "sqrt": lambda x: torch.sqrt(-x.abs() - 1),
        "exp": lambda x: torch.exp(x * 0 + 1000.0),
    }[operation](out)
    origin = trace(made.sum(), {id(p): [n] for n, p in model.named_parameters()})
    assert origin.operation in (operation, "reciprocal")
    assert origin.module == "2"


def test_a_target_that_is_no_result_of_the_model() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    model = torch.nn.Linear(4, 1)
    target = torch.tensor([[0.0], [math.inf]])
    loss = torch.nn.functional.smooth_l1_loss(model(torch.ones(2, 4)), target)
    origin = trace(loss, {id(p): [n] for n, p in model.named_parameters()})
    assert (origin.operation, origin.entered) == ("", "smooth_l1_loss")


def test_of_a_table_that_is_also_the_last_layer_the_nearest_is_told() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    table, last = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    last.weight = table.weight
    names = {id(table.weight): ["table.weight", "last.weight"]}
    rows = table(torch.tensor([1, 2])).sin()
    assert trace((last(rows) / torch.zeros(1)).sum(), names).module == "last"
    assert trace(last(rows / torch.zeros(1)).sum(), names).module == "table"


def test_a_shortcut_to_a_later_operation_does_not_hide_the_first() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    inner, outer = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
    x = inner(torch.ones(2, 4))
    hole = x.masked_fill(torch.tensor([[True], [False]]), -torch.inf).softmax(-1)
    late = outer(middle := x + hole)
    for _ in range(5):
        late = -late
    loss = late.sum() + middle.sum()
    names = {id(p): [f"inner.{n}"] for n, p in inner.named_parameters()}
    made = trace(loss, names)
    assert (made.operation, made.module) == ("softmax", "inner")


def test_what_changes_no_numbers_did_not_make_them() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    x = torch.nn.Linear(4, 4)(torch.ones(2, 4)) + torch.nan
    for passed in (x.relu(), x.view(-1).tanh(), x.t().reshape(8).unsqueeze(0).sigmoid()):
        assert trace(passed.pow(2).sum(), {}).operation == "add"


class Spectrum:
    """Its module takes the logarithm of the input before the first layer, which has a parameter."""

    @staticmethod
    def made() -> Any:
        torch = pytest.importorskip("torch")

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

            def forward(self, x: Any) -> Any:
                x = x.log()
                h = self.first(x)
                return self.last(h) / 3

        return Net()


def test_a_constant_was_made_before_it_came_into_the_graph(monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.recording import code_locations
    from ddpdoctor.probe.watchers.numerics import nonfinite_origin

    net = Spectrum.made()
    names = {id(p): [n] for n, p in net.named_parameters()}
    origin = nonfinite_origin.trace(net(torch.zeros(2, 4)).sum(), names)
    assert (origin.operation, origin.entered, origin.module) == ("", "addmm", "first")
    monkeypatch.setattr(code_locations, "classify", lambda file: "user")
    place = nonfinite_origin.line_of_maker(net, "first")
    assert place is not None and "x.log()" in linecache.getline(*place[:2])
    assert nonfinite_origin.line_of_maker(net, "last") == place


HELPED = """
import torch

def squash(h):
    return inner(h)

def inner(h):
    return torch.log(h)

def other(h):
    return h.sqrt()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)

    @staticmethod
    def lower(x):
        return 1 / x.{beside}()

    def forward(self, x):
        x = self.lower(x)
        return squash(self.first(x))
"""


@pytest.fixture
def helped(tmp_path: Path, monkeypatch: Any) -> Callable[[str], Any]:
    """A module whose forward calls functions of its file."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def made(beside: str) -> Any:
        name = f"helped_by_{beside}"
        (tmp_path / f"{name}.py").write_text(HELPED.replace("{beside}", beside))
        net = importlib.import_module(name).Net()
        monkeypatch.delitem(sys.modules, name)
        return net

    return made


def test_the_line_of_an_operation_in_what_the_forward_calls(helped: Callable[[str], Any]) -> None:
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import line_of_maker, line_of_operation

    place = line_of_operation("log", helped("exp"), None)
    assert place is not None and place[1:] == (8, "inner")
    assert line_of_operation("log", helped("log"), None) is None, "in two places"
    assert line_of_operation("sqrt", helped("abs"), None) is None, "nothing calls it"
    made = line_of_maker(helped("abs"), "first")
    assert made is not None and made[1:] == (20, "lower")


BEFORE = """
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)

class Scale(nn.Module):
    def forward(self, x):
        return x / 255.0

class Logs(nn.Module):
    def forward(self, x):
        return x.log()

class Trained(nn.Linear):
    def forward(self, x):
        return super().forward(x).log()

class Net(nn.Module):
    def __init__(self, later):
        super().__init__()
        self.scale, self.norm, self.later = Scale(), Norm(), later
        self.body = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    def forward(self, x):
        x = self.body(self.norm(self.scale(x)))
        return self.later(x)
"""


@pytest.fixture
def before(tmp_path: Path, monkeypatch: Any) -> Any:
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "modules_before.py").write_text(BEFORE)
    made = importlib.import_module("modules_before")
    monkeypatch.delitem(sys.modules, "modules_before")
    return made


AFTER = """
import torch

class Loss(torch.nn.Module):
    def forward(self, x):
        return (x / x.sum(1, keepdim=True)).mean()

class Trainer:
    def __init__(self):
        self.criterion = Loss()

    def rate(self, step):
        return step / 7

    def mean(self, x, mask):
        return (x * mask).sum() / mask.sum()

    def accuracy(self, out, right):
        return right / len(out)

    def step(self, model, x, look):
        self.rate(3)
        out = model(x)
        {lines}
        loss = {loss}
        look()

trainer = Trainer()
"""


@pytest.mark.parametrize(
    ("loss", "lines", "expected"),
    [
        ("self.mean(out, x)", "", {16}),
        ("self.criterion(out)", "", {6}),
        ("trainer.mean(out, x)", "", {16}),
        ("(out / x.sum()).mean()", "", {25}),
        ("torch.nn.functional.mse_loss(out, x)", "", set()),
        ("out.mean() / 4", "", set()),
        ("self.mean(out, x)", "self.accuracy(out, x)", {16, 19}),
    ],
)
def test_the_lines_between_the_forward_and_the_backward(
    tmp_path: Path, monkeypatch: Any, loss: str, lines: str, expected: set[int]
) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import lines_from

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    text = AFTER.replace("{loss}", loss).replace("{lines}", lines or "pass")
    (tmp_path / "trained_after.py").write_text(text)
    linecache.checkcache()
    monkeypatch.delitem(sys.modules, "trained_after", raising=False)
    importlib.invalidate_caches()
    made = importlib.import_module("trained_after")
    found: list[set[int]] = []

    def look() -> None:
        places = lines_from("div", sys._getframe(1), 23)
        found.append({line for _, line, _ in places})

    made.trainer.step(torch.nn.Linear(3, 3), torch.ones(2, 3), look)
    assert found == [expected]


def test_a_module_without_parameters_made_it_before_one_with_them(before: Any) -> None:
    from torch.nn import Linear, Sequential

    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import line_of_maker

    def line(model: Any, name: str) -> int:
        place = line_of_maker(model, name)
        return place[1] if place is not None else -1

    norm, scale, logs = before.Norm, before.Scale, before.Logs
    assert line(Sequential(norm(), Linear(4, 1)), "1") == 7
    assert line(Sequential(scale(), norm(), Linear(4, 1)), "2") == 7
    assert line(Sequential(scale(), Linear(4, 1)), "1") == -1, "a number divides it"
    assert line(Sequential(Linear(4, 1), norm()), "0") == -1, "it comes later"
    assert line(Sequential(norm(), logs(), Linear(4, 1)), "2") == -1, "one of two"
    assert line(Sequential(before.Trained(4, 4), Linear(4, 1)), "1") == -1, "the graph knows that"
    assert line(before.Net(logs()), "body.1") == 7
    assert line(Sequential(scale(), before.Net(logs())), "1.body.1") == 7


def test_the_module_in_whose_forward_a_line_is(before: Any) -> None:
    from ddpdoctor.probe.watchers.numerics import nonfinite_sites

    def name(net: Any, line: int) -> str:
        sites = SimpleNamespace(line=lambda site, code: site)
        model: Any = SimpleNamespace(inner=lambda: net)
        recorder: Any = SimpleNamespace(sites=sites)
        return nonfinite_sites.module_at(recorder, line, [model])

    net = before.Net(before.Logs())
    assert name(net, 7) == "norm"
    assert name(net, 15) == "later"
    assert name(net, 28) == "", "of the model itself"
    assert name(net, -1) == ""
    assert name(before.Net(before.Norm()), 7) == "", "of two modules"


@pytest.mark.parametrize(("number", "line"), [(3, 7), (9, 40), (-1, 40)])
def test_where_the_forward_made_it_and_the_line_is_not_known(
    monkeypatch: Any, number: int, line: int
) -> None:
    from ddpdoctor.probe.watchers.numerics import nonfinite_origin, nonfinite_sites

    monkeypatch.setattr(nonfinite_origin, "line_of_loss", lambda frame, root: 40)
    sites = SimpleNamespace(number=lambda code, line: line, line=lambda site, code: -1)
    recorder: Any = SimpleNamespace(sites=sites)
    origin = nonfinite_origin.Origin("log", number=number)
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename="train.py"))
    assert nonfinite_sites.site_of_origin(recorder, origin, [], frame, None, 7, False, [5]) == line


def test_a_graph_is_followed_without_running_the_program_again() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    runs = []

    def part(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return model(x).log()

    loss = checkpoint(part, torch.zeros(2, 4) - 1000, use_reentrant=False).sum() * float("nan")
    assert trace(loss, {}).operation == "", "it may have arisen in what is computed anew"
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2


def test_memory_that_was_given_back_is_not_read() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.tensors.digests import finite, readable
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    weight = torch.nn.Parameter(torch.full((64, 64), float("nan")))
    loss = (torch.ones(2, 64) @ weight).sum()
    assert not finite(weight)
    views = weight.detach()[1:], weight.detach().t()
    weight.untyped_storage().resize_(0)
    for tensor in (weight, *views):
        assert not readable(tensor)
        assert finite(tensor), "nothing is known of it"
    assert trace(loss, {}).operation == ""


def test_a_part_of_its_memory_is_enough() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.tensors.digests import readable

    assert readable(torch.zeros(3).expand(1000, 3))
    assert readable(torch.zeros(10)[2:4])
    assert readable(torch.zeros(0))


@pytest.mark.parametrize("operation", ["sqrt", "pow", "acos", "of its own"])
def test_a_derivative_that_was_taken_on_the_way_to_the_loss(operation: str) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training import autograd_grad
    from ddpdoctor.probe.training.autograd_grad import AutogradGrad
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient / ctx.saved_tensors[0]

    made = {
        "sqrt": lambda x: x.pow(2).sum(-1).sqrt(),
        "pow": lambda x: x.abs() ** 0.5,
        "acos": lambda x: (1 + x * 0).acos(),
        "of its own": Own.apply,
    }[operation]
    model = torch.nn.Linear(2, 1)
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    energy = model(made(x).view(-1)[:2]).sum()
    AutogradGrad.renew()
    first = autograd_grad.begins((), {"create_graph": True})
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    AutogradGrad.current.ends(SimpleNamespace(site=lambda: 7), first)  # type: ignore[arg-type]
    origin = trace(force.pow(2).sum() + energy, {id(p): [n] for n, p in model.named_parameters()})
    AutogradGrad.renew()
    assert origin.derivative_site == 7
    assert origin.operation == ("" if operation == "of its own" else operation)
    assert not origin.parameter


def test_calls_that_make_no_graph_leave_nothing() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training import autograd_grad
    from ddpdoctor.probe.training.autograd_grad import AutogradGrad

    AutogradGrad.renew()
    for args, kwargs in (((), {}), ((1, 2, None, True, False), {}), ((), {"create_graph": False})):
        first = autograd_grad.begins(args, kwargs)
        AutogradGrad.current.ends(SimpleNamespace(), first)  # type: ignore[arg-type]
    assert not AutogradGrad.current._ranges
    assert AutogradGrad.current.site_of(torch.ones(1, requires_grad=True).exp().grad_fn) == -1


def ctc(targets: int) -> Any:
    """A CTC loss of an utterance of six frames; one of its results is infinite by design."""
    torch = pytest.importorskip("torch")
    logits = torch.nn.Linear(4, 5)(torch.ones(6, 1, 4))
    given = torch.nn.functional.log_softmax(logits, -1), torch.ones(1, targets, dtype=torch.long)
    return torch.nn.functional.ctc_loss(*given, torch.tensor([6]), torch.tensor([targets]))


def test_a_target_too_long_for_its_input() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import trace

    assert trace(ctc(6), {}).operation == "ctc_loss"
    assert trace(ctc(2) / torch.zeros(1), {}).operation == "div"
