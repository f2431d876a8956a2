"""DDP305 beside `all_to_all`: copies that compute a batch together and never add up gradients."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from recordings import make_run, site, steps
from wraps import group, parameters

from ddpdoctor.events import Tensor, Unwrapped, UnwrappedState
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.recording.weak_references import Reference
from ddpdoctor.probe.training.backwards import Backwards
from ddpdoctor.probe.watchers.manual_sync import exchanges
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchanges
from ddpdoctor.probe.watchers.manual_sync.local_gradients import LocalGradients
from ddpdoctor.probe.watchers.manual_sync.parallelism import Parallelism

CHECK = ModelNotWrapped()
LOOKS = (0, 1, 2, 4, 8)


def rank(n, *, kind="LM", wrapped=0, apart=LOOKS[1:], agree=(), none=(), back=4, looks=LOOKS,
         more=None, other=False):  # fmt: skip
    """At the looks `apart` the parameters differ; the gradients at the positions `agree` do not,
    and there are none at `none`; of four `all_to_all` in a forward, `back` have a backward."""
    yield site(1, "train.py", 3, "model = LM()")
    yield group((0, 1))
    told = parameters(("body", "head"))
    yield Unwrapped(at=0, optimizer=0, kind=kind, parameters=told, wrapped=wrapped, site=1)
    if other:
        yield Unwrapped(at=0, optimizer=1, kind="Dense", parameters=told[:1], site=1)
    for step in looks:
        own = [100 * (n + 1) * (i not in agree) for i in range(4)]
        gradients = [0 if i in none else 50 + step + i + own[i] for i in range(4)]
        values = [70 + step + i + 9 * n * (step in apart) for i in range(4)]
        yield UnwrappedState(
            at=0,
            optimizer=0,
            step=step,
            gradients=sum(gradients),
            parameters=sum(values),
            swaps=(4 * (step + 1), back * (step + 1)),
            each=pack([*gradients, *values]),
            **({"exchanged": "all-to-all"} | (more or {})),
        )
    yield from steps(9)


def found_in(**kwargs):
    return list(CHECK.examine(make_run({n: list(rank(n, **kwargs)) for n in (0, 1)})))


@pytest.mark.parametrize("none", [(), (3,)])
def test_gradients_of_parts_of_a_batch_that_are_never_added_up(none):
    (found,) = found_in(none=none)
    assert (found.severity.value, found.confidence.value) == ("warning", "suspected")
    assert (found.ranks, found.location.line, found.steps.first) == ((0, 1), 3, 0)


@pytest.mark.parametrize("kwargs", [
    pytest.param({"back": 3}, id="nothing is trained before the first: experts alone"),
    pytest.param({"back": 0}, id="no backward"),
    pytest.param({"agree": (1,)}, id="a gradient that is exchanged"),
    pytest.param({"wrapped": 1}, id="the rest is wrapped"),
    pytest.param({"other": True}, id="the rest has an optimizer of its own"),
    pytest.param({"kind": ""}, id="parameters of no module"),
    pytest.param({"apart": LOOKS}, id="parts of their own from the start"),
    pytest.param({"apart": ()}, id="equal all the time"),
    pytest.param({"apart": (1, 2, 4)}, id="equal again"),
    pytest.param({"looks": (0, 1, 2)}, id="too short"),
    pytest.param({"more": {"handed": pack([0])}}, id="a gradient is handed over"),
    pytest.param({"more": {"other": 40}}, id="something is handed over before the step"),
    pytest.param({"more": {"exchanged": "in backward"}}, id="hooks"),
    pytest.param({"more": {"late": 1}}, id="after the step"),
])  # fmt: skip
def test_parts_that_may_be_meant_to_differ(kwargs):
    assert found_in(**kwargs) == []


def divided(n, *, wrapped=1, local=(0, 2), apart=LOOKS[1:], agree=(), missing="", kind="Ranker",
            looks=LOOKS, more=None, table="table"):  # fmt: skip
    """A table of other length on each rank, and two parameters that both have; the gradients at
    `local` come before the `all_to_all` of the backward."""
    told = (
        Tensor(name="head.weight", shape=(2,), dtype="float32"),
        Tensor(name=table, shape=(50 + n,), dtype="float32"),
        Tensor(name="head.bias", shape=(1,), dtype="float32"),
    )
    yield site(1, "train.py", 3, "net = Ranker()")
    yield group((0, 1))
    yield Unwrapped(
        at=0, optimizer=0, kind=kind, parameters=told, wrapped=wrapped, site=1, name="net"
    )
    for step in looks:
        gradients = [50 + step + i + 100 * n * (i not in agree) for i in range(3)]
        values = [70 + step + i + 9 * n * (step in apart) for i in range(3)]
        yield UnwrappedState(
            at=0,
            optimizer=0,
            step=step,
            gradients=sum(gradients),
            parameters=sum(values),
            each=pack([*gradients, *values]),
            local=pack(local) if 0 < step <= 4 and n != missing else "",
            **({"exchanged": "all-to-all"} | (more or {})),
        )
    yield from steps(9)


def told_of(**kwargs):
    return list(CHECK.examine(make_run({n: list(divided(n, **kwargs)) for n in (0, 1)})))


def test_a_part_that_is_not_wrapped_beside_tables_that_are_divided():
    (found,) = told_of()
    assert (found.rule, found.severity.value) == ("after-all-to-all", "warning")
    assert (found.ranks, found.location.line) == ((0, 1), 3)
    assert found.subjects == ("head.weight", "head.bias")
    assert "`net.head = DistributedDataParallel(net.head)`" in found.fix
    (found,) = told_of(table="head.table")
    assert "wrap the module that holds them" in found.fix
    (found,) = told_of(apart=LOOKS)
    assert found.evidence["values differ from the start"] == "yes"
    (found,) = told_of(agree=(0,), more={"other": 1})
    assert found.subjects == ("head.bias",)
    (found,) = told_of(more={"handed": pack([2])})  # a loss for the log is as large
    assert found.subjects == ("head.weight",)


@pytest.mark.parametrize("kwargs", [
    pytest.param({"local": (1,)}, id="only a table"),
    pytest.param({"local": ()}, id="experts between two"),
    pytest.param({"missing": 1}, id="on one rank"),
    pytest.param({"wrapped": 0}, id="nothing is wrapped"),
    pytest.param({"agree": (0, 2)}, id="gradients that are equal"),
    pytest.param({"apart": ()}, id="equal all the time"),
    pytest.param({"apart": (1, 2, 4)}, id="equal again"),
    pytest.param({"looks": (0, 1, 2)}, id="too short"),
    pytest.param({"kind": ""}, id="parameters of no module"),
    pytest.param({"more": {"handed": pack([0, 2])}}, id="handed over"),
    pytest.param({"more": {"other": 40}}, id="something is handed over before the step"),
    pytest.param({"more": {"exchanged": "in backward"}}, id="hooks"),
    pytest.param({"more": {"shared": 1}}, id="synchronised at times"),
])  # fmt: skip
def test_parts_beside_tables_that_may_be_meant_to_differ(kwargs):
    assert told_of(**kwargs) == []


def test_gradients_that_come_before_the_all_to_all_of_the_backward(monkeypatch):
    for kind in (Exchanges, Parallelism, LocalGradients):
        monkeypatch.setattr(kind, "current", kind())
    early, late, both, never = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    watched, recorder = LocalGradients.current, SimpleNamespace(step=9)

    def call(op, size, *, inside):
        monkeypatch.setattr(Backwards.current, "running", lambda: inside)
        made = exchanges.Call(op, 0, False, (torch.zeros(size),))
        Exchanges.current._called(recorder, made)
        watched._called(recorder, made)

    def local(between):
        watched.follow(0, [Reference(p) for p in (early, late, both, never)])
        call("all_to_all", 99, inside=False)
        call("all_reduce", between, inside=False)
        watched._backward_begins(recorder, None)
        for parameter in (early, both):
            parameter.grad = torch.ones(2)
        call("all_to_all", 50, inside=True)
        late.grad = torch.ones(2)
        both.grad += 1
        call("all_to_all", 50, inside=True)
        watched._backward_ends(recorder, None)
        return watched.leave(0)

    assert local(1) == [0]
    assert local(64) == [], "what the ranks computed was combined, after the all_to_all"
    assert watched.leave(0) == []


def test_all_to_all_is_counted_inside_and_outside_of_backwards(monkeypatch):
    monkeypatch.setattr(Exchanges, "current", Exchanges())
    monkeypatch.setattr(Parallelism, "current", Parallelism())
    monkeypatch.setattr(Exchanges.current, "_following", exchanges.Subscriptions())
    assert Parallelism.current.all_to_all_calls() == ()
    for running, kind in ((False, torch.float), (True, torch.float), (False, torch.long)):
        monkeypatch.setattr(Backwards.current, "running", lambda value=running: value)
        tensors = (torch.zeros(4, dtype=kind), torch.zeros(4, dtype=kind))
        Exchanges.current._called(
            SimpleNamespace(step=9), exchanges.Call("all_to_all", 0, False, tensors)
        )
    assert Parallelism.current.all_to_all_calls() == (1, 1)
