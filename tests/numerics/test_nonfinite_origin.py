"""DDP801 over literal events, and what the probe looks at."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.numerics.nonfinite_origin import NonfiniteOrigin
from recordings import make_run, site, steps
from wraps import wrap

from ddpdoctor.events import Event, ExceptionRaised, NonFinite, ScalerStep, Sketch
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.numerics.numerics import Numerics
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding, Severity


def bad(kind: str, step: int, **fields: object) -> Event:
    values: dict[str, object] = {"value": "nan", "site": 1, **fields}
    return NonFinite(at=0, kind=kind, step=step, **values)  # type: ignore[arg-type]


def found(*ranks: list[Event], **more: object) -> list[Finding]:
    lines = [site(1, "train.py", 40, "loss.backward()"), site(2, "model.py", 9, "return a / b")]
    run = make_run(
        {r: [*lines, *events, *steps(12)] for r, events in enumerate(ranks)},
        **more,  # type: ignore[arg-type]
    )
    return list(NonfiniteOrigin().examine(run))


def test_the_rank_whose_loss_was_first() -> None:
    (finding,) = found(
        [bad("parameter", 6, names=("head.weight",))],
        [bad("loss", 5, operation="div", module="head", origin_site=2), bad("parameter", 6)],
    )
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (1,)
    assert finding.steps is not None and finding.steps.first == 5
    assert finding.location is not None and finding.location.file == "model.py"


def test_what_came_first_is_told_by_the_steps_of_all_optimizers() -> None:
    (finding,) = found([bad("loss", 4, total=9)], [bad("loss", 5, total=8)])
    assert finding.ranks == (1,)
    assert finding.steps is not None and finding.steps.first == 5


def test_an_input_and_its_rows() -> None:
    (finding,) = found([bad("input", 3, names=("argument 0",), rows=(2, 7))], [bad("parameter", 4)])
    assert finding.ranks == (0,)
    (finding,) = found([bad("input", 3, names=("argument 0",), rows=(7,))])


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_the_input_holds_is_told_and_not_what_became_of_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    torch = pytest.importorskip("torch")

    inputs = torch.ones(4, 2)
    inputs[3, 1] = float(value)
    monkeypatch.setattr(WrappedModels.current, "live", list)
    monkeypatch.setattr(
        Numerics.current, "_forward_state", lambda live: [("input", [("argument 0", inputs)])]
    )
    recorder = SimpleNamespace(step=5, sites=SimpleNamespace(user_frame=lambda frame: None))
    backward = SimpleNamespace(site=1, number=5)
    event = Numerics.current._diagnose(recorder, backward, torch.tensor(torch.nan))  # type: ignore[arg-type]
    assert (event.kind, event.value, event.rows) == ("input", value, (3,))


@pytest.mark.parametrize(
    ("largest", "norm", "told"),
    [(3e9, 3.1, True), (3e9, 1e7, False), (3e5, 3.1, False), (0.0, 3.1, False)],
)
def test_parameters_that_exploded(largest: float, norm: float, told: bool) -> None:
    sketch = Sketch(at=0, model=0, optimizer=0, kind="parameters", step=2, norm=norm, bins=())
    later = Sketch(at=0, model=0, optimizer=0, kind="parameters", step=4, norm=largest, bins=())
    blown = bad("loss", 5, value="inf", operation="mul", largest=largest)
    (finding,) = found([sketch, later, blown])
    assert (finding.rule == "parameters-exploded") is told
    (finding,) = found([blown])


def test_the_largest_parameter() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics import nonfinite_origin

    plain = [torch.tensor([1.0, -3.0]), torch.ones(2, dtype=torch.int64), torch.empty(0)]
    assert nonfinite_origin.largest(plain) == 3.0
    assert nonfinite_origin.largest([*plain, torch.tensor([9.0, math.inf])]) == 0.0
    assert nonfinite_origin.largest([*plain, torch.tensor([math.nan])]) == 0.0


def test_parameters_that_were_never_initialised() -> None:
    (finding,) = found([bad("parameter", 0)], [bad("parameter", 0)])
    assert finding.rule == "parameter-at-start"


@pytest.mark.parametrize("kind", ["input", "buffer", "parameter"])
def test_what_one_rank_was_given_comes_before_the_loss_of_another(kind: str) -> None:
    (finding,) = found([bad("loss", 3, operation="view")], [bad(kind, 3, names=("argument 0",))])
    assert finding.ranks == (1,)
    assert finding.evidence["first not finite"] == kind


def test_statistics_that_a_forward_in_training_only_writes() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics.numerics import _buffers_read

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].register_buffer("scale", torch.ones(2))
    assert [name for name, _ in _buffers_read(model)] == ["0.scale"]
    assert "1.running_mean" in [name for name, _ in _buffers_read(model.eval())]


def test_a_gradient_of_one_rank_under_a_finite_loss() -> None:
    (finding,) = found(
        [bad("parameter", 8)], [bad("gradient", 7, names=("net.0.weight",), module="net.0")]
    )
    assert finding.ranks == (1,)


def test_parameters_that_grew() -> None:
    (finding,) = found([bad("parameter", 8)], [bad("parameter", 8)])
    assert finding.ranks == (0, 1)


def test_a_gradient_whose_rank_is_not_known() -> None:
    event = bad("parameter", 18, names=("scale",), gradients=True)
    (finding,) = found([event], [event])
    assert finding.steps is not None and finding.steps.first == 17


def test_what_the_optimizer_keeps_tells_that_a_gradient_brought_it() -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training.optimizers import Optimizers
    from ddpdoctor.probe.watchers.numerics import numerics

    for kind, value, brought in (("RMSprop", "nan", True), ("Adam", "inf", True), ("SGD", "", 0)):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, kind)([weight])
        Optimizers.current.sites[optimizer] = -1
        weight.grad = torch.full((3,), float(value or 1))
        optimizer.step()
        weight.data[0] = torch.nan
        assert numerics._caused_by_gradients([weight]) == brought, kind


def lasting(values: list[tuple[Any, Any]]) -> list[Any]:
    """What is told of one backward after another, each with its (parameter, loss)."""
    import torch

    told: list[Any] = []
    recorder = SimpleNamespace(step=1, emit=lambda event, vital: told.append(event))
    Numerics.renew()
    for number, (parameter, loss) in enumerate(values):
        if math.isfinite(loss):
            Numerics.current.lasting = None, 0
            continue
        kind = "loss" if math.isfinite(parameter) else "parameter"
        event = bad(kind, 1, applied=True, backward=number)
        Numerics.current._emit_if_lasting(recorder, event, torch.tensor(loss))  # type: ignore[arg-type]
    Numerics.renew()
    return told


def test_a_loss_that_stays_nan_is_no_overflow() -> None:
    pytest.importorskip("torch")
    nan, inf = math.nan, math.inf
    (event,) = lasting([(1.0, 2.0), *[(1.0, nan)] * 30])
    assert (event.skipped, event.backward, event.total, event.applied) == (16, 1, 1, False)
    (event,) = lasting([(nan, nan)] * 5)
    assert (event.kind, event.skipped, event.backward) == ("parameter", 4, 0)
    assert not lasting([(1.0, inf)] * 60), "a loss scale that is being found"
    assert not lasting([*[(1.0, nan)] * 12, (1.0, 2.0)] * 4), "some in a row"
    assert not lasting([(nan, nan)] * 3)


def test_the_rank_that_was_first_to_skip_for_ever() -> None:
    shared: dict[str, Any] = {"gradients": True, "applied": False, "skipped": 4, "total": 1}
    (finding,) = found(
        [bad("parameter", 1, backward=3, **shared)], [bad("parameter", 1, backward=4, **shared)]
    )
    assert finding.ranks == (0,)
    assert finding.steps is not None and finding.steps.first == 0


def test_gradients_that_the_scaler_looked_at_too_early() -> None:
    event = bad("parameter", 1, gradients=True, applied=False, skipped=4, total=1)
    scaled = ScalerStep(at=0, scaler=0, optimizer=0, call=0, step=0, scale=2.0, skipped=True)
    (finding,) = found([scaled, event], [scaled])
    assert finding.rule == "gradient-of-earlier-step"


def test_what_accumulates_is_remembered_until_the_gradients_are_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.watchers.numerics import numerics

    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), torch.nan)
    monkeypatch.setattr(WrappedModels.current, "live", list)
    monkeypatch.setattr(Optimizers.current, "parameters", lambda: {id(weight): weight})
    monkeypatch.setattr(numerics, "compiling", lambda: False)
    Numerics.renew()
    Numerics.current.plain = torch.Tensor
    Numerics.current.suspect = first = bad("gradient", 5)  # type: ignore[assignment]
    recorder: Any = SimpleNamespace(step=5, every=0)
    backward: Any = SimpleNamespace(roots=(torch.ones(()),), site=1, number=8)
    Numerics.current._backward_begins(recorder, backward)
    assert Numerics.current.suspect is first
    weight.grad = None
    Numerics.current._backward_begins(recorder, backward)
    assert Numerics.current.suspect is None
    Numerics.renew()


class Norm:
    """As `torch.norm`, with a derivative of its own that is NaN at zero."""

    @staticmethod
    def of(x: Any) -> Any:
        import torch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                ctx.save_for_backward(x)
                return x.norm(dim=-1, keepdim=True)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                (x,) = ctx.saved_tensors
                return gradient * x / x.norm(dim=-1, keepdim=True)

        return Function.apply(x)


@pytest.mark.parametrize("whole", [True, False])
def test_own_gradients_are_looked_at_in_every_branch(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training.tracked_model import Model
    from ddpdoctor.probe.watchers.numerics import numerics

    class Flow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))
            self.shift = torch.nn.Parameter(torch.zeros(3))
            self.up, self.down = torch.nn.Linear(1, 3), torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.down(self.up(Norm.of(x * self.scale))) + self.shift

    net = Flow()
    named = dict(net.named_parameters())
    model = Model(0, net, list(named.values()), list(range(len(named))))
    model.names, model.pending = list(named), 1
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    Numerics.renew()
    recorder, backward = SimpleNamespace(step=17, own_ns=0), SimpleNamespace(site=1)
    Numerics.current._watch_gradients(recorder, backward, whole)  # type: ignore[arg-type]
    assert [model.names[i] for i in numerics.sampled_positions(model)] == [
        "shift", "scale", "up.bias", "down.bias",
    ]  # fmt: skip
    net(torch.zeros(2, 4)).sum().backward()
    Numerics.current._backward_ends(recorder, backward)  # type: ignore[arg-type]
    assert all(p._backward_hooks is None for p in named.values())
    suspect = Numerics.current.suspect
    Numerics.renew()
    assert (suspect is not None) is whole
    if suspect is not None:
        assert (suspect.kind, suspect.value, suspect.names) == ("gradient", "nan", ("scale",))


def test_no_step_was_taken_on_it() -> None:
    assert not found([bad("loss", 5, applied=False)], [])


def test_the_program_ended_over_it() -> None:
    error = ExceptionRaised(at=0, kind="FloatingPointError", message="loss is nan")
    (finding,) = found([bad("loss", 5, applied=False), error], [], ended={0: 1, 1: -15})
    assert finding.ranks == (0,)


def test_the_program_stopped_before_the_backward_of_it() -> None:
    stopped = bad("loss", 12, site=-1, origin_site=2, entered="mse_loss", applied=False,
                  stopped=True)  # fmt: skip
    (finding,) = found([], [stopped])
    assert (finding.rule, finding.ranks) == ("before-operation", (1,))
    assert finding.location is not None and finding.location.file == "model.py"
    assert finding.related == ()
    failed = ExceptionRaised(at=1, kind="FloatingPointError", message="loss", frames=(), step=12)
    raised = make_run({0: steps(12), 1: [site(2, "model.py", 9, ""), *steps(12), stopped, failed]})
    report = diagnose(raised, [NonfiniteOrigin(), FirstFailure()])
    (finding,) = [f for f in report.findings if f.code == "DDP801"]
    assert [f.check for f in finding.consequences] == ["first-failure"]


def test_nothing_wrong() -> None:
    assert not found([], [])
    assert NonfiniteOrigin().unobserved(make_run({0: []}))


def test_an_operation_that_may_have_been_given_it_is_not_blamed() -> None:
    (finding,) = found([bad("loss", 5, operation="add", module="up", origin_site=2)], [])
    assert finding.rule == "passed-on"


def test_what_came_in_as_a_constant_blames_no_operation() -> None:
    event = bad("loss", 5, entered="addmm", module="first", origin_site=2)
    (finding,) = found([event], [])
    assert finding.rule == "before-operation"


@pytest.mark.parametrize(
    ("made", "rule"),
    [({"entered": "addmm"}, "before-operation"), ({"operation": "log"}, "operation")],
)
def test_the_module_whose_line_made_it_is_named(made: dict[str, str], rule: str) -> None:
    event = bad("loss", 5, module="first", within="norm", origin_site=2, **made)
    (finding,) = found([event], [])
    assert (finding.rule, finding.evidence["module"]) == (rule, "norm")


def test_inputs_that_no_wrapper_was_given_are_not_called_finite() -> None:
    event = bad("loss", 5, entered="addmm", origin_site=2)
    (unwrapped,) = found([event], [])
    (wrapped,) = found([wrap(), event], [wrap()])
    assert unwrapped.rule == wrapped.rule == "before-operation"
    assert unwrapped.cause != wrapped.cause


def test_the_template_is_about_what_the_derivative_is_of() -> None:
    lines = site(3, "model.py", 12, "torch.autograd.grad(e, pos, create_graph=True)")
    event = bad("loss", 5, operation="sqrt", origin_site=2, derivative_site=3)
    (finding,) = found([lines, event], [lines])
    assert finding.related[0].label == "the derivative is taken here"
    (unknown,) = found([lines, bad("loss", 5, origin_site=3, derivative_site=3)], [lines])
    assert finding.rule == unknown.rule == "derivative"
    assert finding.fix != unknown.fix, "only the first names the operation"


def test_inputs_whose_gaps_are_masked_are_not_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training.tracked_model import Model

    Numerics.renew()
    Numerics.current.plain = torch.Tensor
    monkeypatch.setattr(Numerics.current, "_watch_gradients", lambda *_: None)
    monkeypatch.setattr(Numerics.current, "_diagnose", lambda *_: bad("input", 5))
    monkeypatch.setattr(Numerics.current, "_emit_if_lasting", lambda *_: None)
    model = Model(0, torch.nn.Linear(2, 1), [], [])
    recorder: Any = SimpleNamespace(step=5, every=0, affordable=lambda: False)
    given = torch.tensor([1.0, torch.nan])
    for loss in (torch.nan, 1.0):
        model.forwards += 1
        forward: Any = SimpleNamespace(model=model, grad_enabled=True, args=(given,), kwargs={})
        forward.output = None
        Numerics.current._forward_due(recorder, forward)
        Numerics.current._forward_ends(recorder, forward)
        backward: Any = SimpleNamespace(roots=(torch.tensor(loss),), site=1, number=8)
        assert [name for name, _ in dict(Numerics.current._forward_state([model]))["input"]]
        Numerics.current._backward_begins(recorder, backward)
        assert (model in Numerics.current.masked) is (loss == 1.0)
    assert dict(Numerics.current._forward_state([model]))["input"] == []
    Numerics.renew()


def test_what_came_in_after_the_forward_blames_no_module() -> None:
    event = bad("loss", 5, entered="mul", beyond="finite", origin_site=2)
    (finding,) = found([event], [])
    assert finding.location is not None and finding.location.file == "model.py"
    (finding,) = found([bad("loss", 5, entered="mul", beyond="gone")], [])
    assert finding.location is not None and finding.location.line == 40


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("spoilt", ["loss", "forward"])
def test_a_constant_that_comes_in_after_the_forward(
    monkeypatch: pytest.MonkeyPatch, spoilt: str, kept: bool
) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training.tracked_model import Model
    from ddpdoctor.probe.watchers.numerics import nonfinite_origin

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.last(x) * (math.nan if spoilt == "forward" else 1.0)

    Numerics.renew()
    Numerics.current.plain = torch.Tensor
    net = Net()
    model = Model(0, net, list(net.parameters()), [0, 1])
    out = net(torch.ones(3, 2))
    forward: Any = SimpleNamespace(model=model, grad_enabled=True, output=out, args=(), kwargs={})
    Numerics.current._forward_ends(SimpleNamespace(), forward)  # type: ignore[arg-type]
    loss = out.sum()
    loss = loss * (math.nan if spoilt == "loss" else 1.0)
    forward.output = None
    if not kept:
        del out
    origin = nonfinite_origin.trace(loss, {})
    assert origin.entered == "mul"
    told = Numerics.current._entered_after_forwards(origin, [model])
    Numerics.renew()
    assert told == ({True: "finite", False: "gone"}[kept] if spoilt == "loss" else "")


def test_the_line_that_lets_it_in() -> None:
    torch = pytest.importorskip("torch")
    import sys

    from ddpdoctor.probe.watchers.numerics.nonfinite_origin import line_after

    width = 3 * 4
    frame = sys._getframe()
    first = frame.f_lineno
    loss = torch.ones(width).sum()
    loss = loss * math.nan
    assert line_after("mul", frame, loss, first) == first + 2
    assert line_after("log", frame, loss, first) == -1
