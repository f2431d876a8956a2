"""DDP305 where copies of the gradients are exchanged, and what comes of them is not used."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from msgspec.structs import replace
from recordings import make_run, site, steps
from wraps import codes, group, parameters

from ddpdoctor.events import Unwrapped, UnwrappedState
from ddpdoctor.probe.collectives.call_hooks import Call
from ddpdoctor.probe.watchers.manual_sync.unused_allreduce import UnusedAllreduce

CHECK = ModelNotWrapped()


def look(rank, step, *, copied=1.0, gradients=None, values=None):
    return UnwrappedState(
        at=0, optimizer=0, step=step, exchanged="gradients", each="x", copied=copied, copied_site=2,
        gradients=10 * step + rank if gradients is None else gradients,
        parameters=100 * step + step * rank if values is None else values,
    )  # fmt: skip


def run_of(change=lambda state, rank: state, count=4):
    lines = [site(1, "train.py", 3, "net = Net()"), site(2, "train.py", 8, "dist.all_reduce(flat)")]
    event = Unwrapped(
        at=0, optimizer=0, kind="Net", parameters=parameters(("body", "head")), site=1
    )
    return make_run({
        r: [*lines, group((0, 1)), event, *(change(look(r, n), r) for n in range(count)), *steps(9)]
        for r in (0, 1)
    })  # fmt: skip


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1.0004])
def test_a_copy_whose_average_is_not_written_back(ratio):
    (found,) = CHECK.examine(run_of(lambda state, rank: replace(state, copied=ratio)))
    assert found.severity.value == "error"
    assert (found.ranks, found.location.line) == ((0, 1), 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda s, r: replace(s, gradients=s.step),  # applied alike
        lambda s, r: replace(s, parameters=s.step),  # made equal by other means
        lambda s, r: replace(s, parameters=7) if s.step == 3 else s,  # local SGD
        lambda s, r: replace(s, copied=0.7),  # not copies of what is applied
        lambda s, r: replace(s, copied=0.0),  # not known
        lambda s, r: replace(s, copied=0.7) if (s.step, r) == (2, 1) else s,
    ],
)
def test_an_exchange_that_may_be_of_use(change):
    assert codes(run_of(change), CHECK) == []


def test_two_looks_prove_nothing():
    assert codes(run_of(count=2), CHECK) == []


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(UnusedAllreduce, "current", UnusedAllreduce())
    net = torch.nn.Linear(5, 3)
    net(torch.randn(4, 5)).sum().backward()
    return list(net.parameters())


def shared(op, tensors, parameters, *more, step=0):
    recorder = SimpleNamespace(step=step, site=lambda: 4)
    for each in (*tensors, *more):
        UnusedAllreduce.current._called(recorder, Call(op, 0, False, (each,)))
    return UnusedAllreduce.current.norm_ratio(recorder, parameters)


def test_copies_have_the_norm_of_what_is_applied(model):
    copies = [p.grad.clone() for p in model]
    assert shared("all_reduce", copies, model) == (pytest.approx(1), 4)


@pytest.mark.parametrize("parts", [1, 2])
def test_beside_buffers_a_loss_may_be_handed_over(model, parts):
    flat = torch.cat([p.grad.flatten() for p in model]) / 2
    buffers = flat.clone().chunk(parts)
    loss = torch.tensor(100.0)
    assert shared("all_reduce", buffers, model, loss) == (pytest.approx(0.5), 4)


def test_a_gradient_that_is_exchanged_in_place_is_no_copy(model):
    assert shared("all_reduce", [p.grad for p in model], model) == (0.0, -1)


def test_what_is_gathered_stays_as_it_is(model):
    assert shared("all_gather", [p.grad for p in model], model) == (pytest.approx(1), 4)


def test_other_steps_are_not_looked_at(model):
    assert shared("all_reduce", [p.grad.clone() for p in model], model, step=9) == (0.0, -1)
    assert shared("all_reduce", [p.grad.clone() for p in model], model, step=16) != (0.0, -1)
    assert UnusedAllreduce.current.norm_ratio(SimpleNamespace(step=17), model) == (0.0, -1)


def test_parameters_of_another_size_are_no_copies(model):
    assert shared("all_reduce", [torch.ones(9), torch.ones(40)], model) == (0.0, -1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_share(model, value):
    copies = [torch.full_like(p.grad, value) for p in model]
    assert shared("all_reduce", copies, model) == (0.0, -1)
    for parameter in model:
        parameter.grad.fill_(value)
    assert shared("all_reduce", copies, model) == (0.0, -1)
