"""DDP801: a NaN loss that leaves the gradients finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_nonfinite_origin import bad, found


def test_a_nan_loss_that_leaves_the_gradients_finite() -> None:
    first = bad("loss", 5, operation="log", spared=1, last=5)
    both = [first, bad("loss", 5, operation="log", spared=7, last=11)]
    (finding,) = found([], both)
    assert finding.ranks == (1,)
    assert finding.steps is not None
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (5, 11, 7)
    (finding,) = found([bad("loss", 8, operation="div")], both)
    assert finding.ranks == (0,), "what spreads comes before what does not"


@pytest.mark.parametrize("case", ["log", "clean", "mended", "hooked", "nothing", "skipped"])
def test_a_step_on_a_nan_loss_with_finite_gradients(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    torch = pytest.importorskip("torch")
    from ddpdoctor.probe.training.accumulate_grad import GradientHooks
    from ddpdoctor.probe.training.tracked_model import Model
    from ddpdoctor.probe.training.wrapped_models import WrappedModels
    from ddpdoctor.probe.watchers.numerics.numerics import Numerics

    net = torch.nn.Linear(2, 3)
    named = dict(net.named_parameters())
    model = Model(0, net, list(named.values()), list(range(len(named))))
    model.names, model.pending = list(named), 1
    optimizer = torch.optim.SGD(net.parameters())
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    told: list[Any] = []
    sites = SimpleNamespace(user_frame=lambda frame: None, line=lambda site, code: -1)
    emit = lambda event, vital=False: told.append(event)  # noqa: E731
    recorder: Any = SimpleNamespace(step=9, own_ns=0, every=0, sites=sites, emit=emit)
    recorder.affordable = lambda: True
    Numerics.renew()
    Numerics.current.plain = torch.Tensor
    if case == "hooked":
        for parameter in net.parameters():
            parameter.register_hook(torch.nan_to_num)
    others = GradientHooks()
    for number in range(3):
        out = net(torch.ones(4, 2))
        given = {"clean": 100, "mended": 0, "nothing": 100}.get(case, -100)
        loss = torch.log(out * 0 if case == "mended" else out + given)
        loss = (loss[:0] if case == "nothing" else loss * 0 if case == "mended" else loss).mean()
        optimizer.zero_grad()
        backward: Any = SimpleNamespace(roots=(loss,), site=1, number=number)
        others.add([(p, lambda gradient: None) for p in net.parameters()])
        Numerics.current._backward_begins(recorder, backward)
        loss.backward()
        Numerics.current._backward_ends(recorder, backward)
        others.remove()
        for parameter in net.parameters():
            parameter.grad.nan_to_num_()
        step: Any = SimpleNamespace(optimizer=lambda: optimizer, number=number)
        if case != "skipped":
            Numerics.current._step_begins(recorder, step)
    Numerics.current._leaving(recorder, None)
    Numerics.renew()
    assert [(e.kind, e.step, e.spared, e.last) for e in told if e.applied] == (
        [("loss", 0, 1, 0), ("loss", 0, 3, 2)] if case == "log" else []
    )
