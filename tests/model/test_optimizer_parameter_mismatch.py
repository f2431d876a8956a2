"""DDP307: trained and in no optimizer, or in an optimizer and not trained."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.optimizer_parameter_mismatch import OptimizerParameterMismatch
from msgspec.structs import replace
from recordings import make_run, site, steps
from wraps import LAYERS, codes, rank, wrap

from ddpdoctor.events import OptimizerSeen, Ownership, Replica, Tensor
from ddpdoctor.events.drift import UNHELD
from ddpdoctor.events.pack import pack
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.graph import optimizer_coverage
from ddpdoctor.probe.watchers.graph.optimizer_coverage import OptimizerCoverage
from ddpdoctor.report.findings import Severity, Steps

CHECK = OptimizerParameterMismatch()


def owned(missing=(), **more):
    values = {"model": 0, "kind": "Adam", "step": 1, "trained": 6, "held": 4, "site": 60, **more}
    return Ownership(at=0, missing=tuple(missing), **values)


def both(*events):
    line = site(60, "train.py", 6, "optimizer = Adam(...)")
    return make_run({r: rank(line, *events, *steps(4)) for r in (0, 1)})


def test_a_part_that_was_forgotten():
    (found,) = CHECK.examine(both(owned(["aux.weight", "aux.bias"])))
    assert found.severity.value == "error"
    assert found.location.line == 6
    assert found.subjects == ("aux.weight", "aux.bias")


def test_an_optimizer_of_a_discarded_model():
    run = both(owned(["body.weight"] * 6, stale=("4x4",) * 4))
    (found,) = CHECK.examine(run)
    assert found.severity.value == "error"


@pytest.mark.parametrize(
    ("more", "rule"), [(0, "built-before-sharding"), (3, "built-while-gathered")]
)
def test_an_optimizer_from_before_the_model_was_sharded(more, rule):
    event = owned(["0.weight"], model=-1, module="Net", stale=("4x4",), trained=1 + more)
    run = make_run({r: [site(60, "train.py", 6, "optimizer = ..."), event] for r in (0, 1)})
    assert CHECK.unobserved(run) != "no model was wrapped in DistributedDataParallel"
    (found,) = CHECK.examine(run)
    assert (found.severity.value, found.location.line, found.rule) == ("error", 6, rule)


MOST = ["body.weight", "body.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    "more, found",
    [
        ({"outer": True}, "DDP307 note"),
        ({"outer": True, "empty": 1}, "DDP307 error"),
        ({}, "DDP307 error"),
    ],
)
def test_most_is_left_out_and_the_rest_is_nearest_to_the_loss(more, found):
    assert codes(both(owned(MOST, **more)), CHECK) == [found]


@pytest.mark.parametrize(
    "frozen, stepped, found",
    [
        (MOST, 2, "DDP307 error"),
        (MOST[:2], 2, "DDP307 note"),  # the rest was left out from the start
        (MOST, 8, "DDP307 note"),  # the optimizer came after the unfreezing
    ],
)
def test_most_is_left_out_since_it_was_unfrozen(frozen, stepped, found):
    def listed(still):
        names = [p.name for p in wrap().parameters]
        return tuple(Tensor(name=n, shape=(4,), dtype="float32", trainable=n not in still)
                     for n in names)  # fmt: skip

    line = site(60, "train.py", 6, "optimizer = Adam(...)")
    again = replace(wrap(model=1, listed=listed(())), at=5)
    made = OptimizerSeen(at=stepped, optimizer=0, kind="Adam", site=60, models=(1,))
    events = [line, again, made, owned(MOST, outer=True, model=1), *steps(9)]
    first = replace(wrap(listed=listed(frozen)), at=1)
    run = make_run({r: rank(*events, wrapped=first) for r in (0, 1)})
    assert codes(run, CHECK) == [found]
    (finding,) = CHECK.examine(run)
    severe = finding.severity is Severity.ERROR
    assert finding.rule == ("unfrozen-later" if severe else "not-covered")


def test_most_is_left_out_and_the_rest_is_a_small_part_of_the_model():
    sizes = [("prompt", 8), ("body.weight", 64), ("body.bias", 8)]
    listed = tuple(Tensor(name=n, shape=(s,), dtype="float32", trainable=True) for n, s in sizes)
    event = owned(["body.weight", "body.bias"], trained=3)
    run = make_run({r: rank(event, *steps(4), wrapped=wrap(listed=listed)) for r in (0, 1)})
    assert codes(run, CHECK) == ["DDP307 note"]


def test_a_parameter_group_that_is_empty():
    (found,) = CHECK.examine(both(owned(MOST, outer=True, empty=1)))
    assert found.rule == "empty-group"


@pytest.mark.parametrize(
    "arrived, missing, outer",
    [
        ("dcba", "ab", True),  # the head alone is held
        ("dcba", "cd", False),  # what comes before it
        ("dcba", "ac", False),
        ("abcd", "cd", True),  # the head was made first
        ("dcba", "abcd", False),
        ("", "ab", True),
        ("", "cd", False),
    ],
)
def test_what_is_missing_is_farther_from_the_loss(monkeypatch, arrived, missing, outer):
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model = Model(0, net, list(net.parameters()), [0, 1, 2, 3])
    model.names = list("abcd")
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    monkeypatch.setattr(
        optimizer_coverage, "ready_indices", lambda _: ["abcd".index(n) for n in arrived]
    )
    assert optimizer_coverage._are_outermost(0, "abcd", set(missing)) is outer


def test_adapters_that_were_put_in_after_the_optimizer_was_built():
    event = owned([f"{n}.lora.weight" for n in range(5)], held=21, frozen=19)
    (found,) = CHECK.examine(both(event))
    assert (found.severity, found.rule) == (Severity.ERROR, "mostly-frozen")


def test_a_wrapped_model_that_no_optimizer_holds():
    (found,) = CHECK.examine(both(owned([f"{n}.weight" for n in range(6)])))
    assert (found.severity, found.steps) == (Severity.ERROR, Steps(0, 3, 4))


@pytest.mark.parametrize("optimizer, found", [(UNHELD, ["DDP307 error"]), (1, [])])
def test_only_what_an_optimizer_of_another_rank_holds_is_not_missing(optimizer, found):
    copies = Replica(at=0, model=0, optimizer=optimizer, ranks=(0, 1), parameters=pack(range(6)))
    event = owned([f"{layer}.weight" for layer in LAYERS], trained=3, stale=("4x4",) * 3)
    run = make_run({0: rank(event, *steps(4)), 1: rank(copies, *steps(4))})
    assert codes(run, CHECK) == found


def test_an_optimizer_that_came_later():
    assert codes(both(owned(["aux.weight"]), owned([])), CHECK) == []


def test_several_optimizers_that_hold_all():
    assert codes(both(), CHECK) == []


def kept(since, line=60):
    """The optimizer of line 6 was made for the first of two models that one line wraps."""
    made = OptimizerSeen(at=0, optimizer=0, kind="Adam", site=60, models=(0,), parameters=6)
    names = [f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")]
    gone = owned(names, model=1, trained=6, site=line, since=since)
    return both(made, wrap(model=1), gone)


def test_an_optimizer_that_is_kept_for_the_model_of_the_next_fold():
    (found,) = CHECK.examine(kept(since=2))
    assert (found.severity, found.steps) == (Severity.ERROR, Steps(2, 3, 2))
    assert found.location.line == 6


@pytest.mark.parametrize("run", [kept(since=0), kept(since=2, line=61)])
def test_an_optimizer_of_a_model_that_was_wrapped_beside_it(run):
    (found,) = CHECK.examine(run)
    assert found.rule == "not-covered"


@pytest.mark.parametrize("begun", [-1, 0, 2])
def test_the_step_at_which_parameters_began_to_be_trained(begun):
    (found,) = CHECK.examine(both(owned(["aux.weight"], begun=begun)))
    assert found.steps == (Steps(2, 3, 2) if begun == 2 else Steps(0, 3, 4))


def test_an_optimizer_of_the_parameters_of_another_model():
    names = [f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")]
    second = site(61, "train.py", 5, "first = Adam(a.parameters())")
    events = second, wrap(model=1, kind="Critic"), owned(names, whose=1, other=61, site=60)
    (found,) = CHECK.examine(both(*events))
    assert (found.severity, found.location.line) == (Severity.ERROR, 6)
    assert "also holds them" in [r.label for r in found.related if r.location.line == 5]


@pytest.mark.parametrize("case", ["same", "trained by itself", "idle", "some of its own"])
def test_whose_parameters_an_optimizer_holds_that_another_one_holds_too(monkeypatch, case):
    a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    model = Model(3, a, list(a.parameters()), [0, 1])
    model.backwards = int(case != "idle")
    first, second = torch.optim.SGD(a.parameters()), torch.optim.SGD(a.parameters())
    if case == "some of its own":
        second.add_param_group({"params": [b.bias]})
    every = [second] if case == "trained by itself" else [first, second]
    monkeypatch.setattr(Optimizers.current, "made", lambda: every)
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    whose, _ = optimizer_coverage._shared_model(second, b)
    assert whose == (3 if case == "same" else -1)
    mine = {id(p): p for p in b.parameters()}
    assert optimizer_coverage._optimizer_to_name(second, mine) is second, (
        "of two alike the one that steps"
    )


def test_parameters_that_are_unfrozen_later(monkeypatch):
    begun = []
    monkeypatch.setattr(
        optimizer_coverage, "_emit", lambda _, watch, *more: begun.append(watch.begun)
    )
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[1].parameters())
    held, watch = {id(p): p for p in net[1].parameters()}, optimizer_coverage.Watch(0)
    for number in (0, 8, 16, 32):
        net[0].requires_grad_(number > 8)
        net(torch.ones(1, 2)).sum().backward()
        step = SimpleNamespace(number=number, optimizer=lambda: optimizer)
        optimizer_coverage._compare(SimpleNamespace(step=number), net, watch, held, step)
    assert begun == [{"0.weight": 16, "0.bias": 16}]


def test_a_model_is_looked_at_in_its_own_first_steps():
    watch = optimizer_coverage.Watch(0, began=45)
    assert [step for step in range(45, 80) if watch.is_due(step)] == [45, 46, 47, 49, 53, 61, 77]


def train_with(monkeypatch, net, choose, count=40, every=10):
    """What is told missing, where every so many steps a new optimizer takes the last one's place.
    `choose` gives the parameters of each."""
    told = []
    monkeypatch.setattr(
        optimizer_coverage, "_emit", lambda *args: told.append((args[0].step, args[3]))
    )
    monkeypatch.setattr(OptimizerCoverage.current, "_watches", {})
    monkeypatch.setattr(optimizer_coverage, "sharded_roots", list)
    model = Model(0, net, list(net.parameters()), [])
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])
    for number in range(count):
        if number % every == 0:
            mine = list(choose(number // every))
            optimizer = torch.optim.SGD(mine, lr=0.1)
            held = {id(p): p for p in mine}
        monkeypatch.setattr(Optimizers.current, "parameters", lambda held=held: held)
        monkeypatch.setattr(Optimizers.current, "made", lambda optimizer=optimizer: [optimizer])
        recorder = SimpleNamespace(step=number)
        net.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        model.backward_step = number
        OptimizerCoverage.current._backward_ends(recorder, SimpleNamespace(models=[model]))
        step = SimpleNamespace(number=number % every, optimizer=lambda o=optimizer: o)
        OptimizerCoverage.current._step_due(recorder, step)
        optimizer.step()
    return told


def test_an_optimizer_in_the_place_of_another_is_looked_at_in_its_first_steps(monkeypatch):
    net = torch.nn.Linear(2, 1)
    copy = deepcopy(net)
    parts = [net, net, copy, copy]
    told = train_with(monkeypatch, net, lambda turn: parts[turn].parameters())
    assert next(at for at, missing in told if missing) == 21
    assert told[-1][1] == ["weight", "bias"]


def test_what_an_optimizer_from_before_the_examination_held():
    watch = optimizer_coverage.Watch(0)
    watch.first, watch.missing = {"held": (1, 1), "by_hand": (2, 1)}, {"by_hand": (3, 2)}
    watch.renew(30)
    assert watch.first == {"by_hand": (2, 1)}


def test_optimizers_that_take_turns(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    told = train_with(monkeypatch, net, lambda turn: net[turn % 2].parameters(), count=60)
    assert told[-1][1] == []


@pytest.mark.parametrize("beside, expected", [(0, Steps(30, 89, 60)), (30, Steps(0, 59, 60))])
def test_the_steps_of_an_optimizer_in_the_place_of_another(beside, expected):
    first = OptimizerSeen(at=0, optimizer=0, kind="SGD", site=61, models=(0,), parameters=6)
    second = OptimizerSeen(at=0, optimizer=1, kind="SGD", site=60, parameters=6)
    names = [f"{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")]
    gone = owned(names, stale=("4x4",), begun=0)
    later = [*steps(60, optimizer=1), *steps(beside, first=30)]
    run = make_run({0: rank(first, *steps(30), second, gone, *later)})
    (found,) = CHECK.examine(run)
    assert found.steps == expected


@pytest.mark.parametrize("gone", [True, False])
def test_an_optimizer_whose_trained_model_is_gone(monkeypatch, gone):
    monkeypatch.setattr(ModuleOrigins.current, "in_some_module", lambda parameter: not gone)
    old, new = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    held, mine = list(old.parameters()), {id(p) for p in new.parameters()}
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    old(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer_coverage._stale(optimizer, mine) == (held if gone else [])
    optimizer.add_param_group({"params": list(new.parameters())})
    assert optimizer_coverage._stale(optimizer, mine) == []


def test_idle_parameters_alone_are_no_fault():
    assert codes(both(owned([], stale=("4x4",))), CHECK) == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_parameters_that_the_program_updates_by_hand(monkeypatch, by_hand):
    """Their values at two steps of another optimizer say nothing of what happens in between."""
    told = []
    monkeypatch.setattr(optimizer_coverage, "_emit", lambda *args: told.append(args[3]))
    monkeypatch.setattr(OptimizerCoverage.current, "_watches", {})
    monkeypatch.setattr(Optimizers.current, "parameters", dict)
    recorder = SimpleNamespace(step=0)
    module, other = torch.nn.Linear(2, 1, bias=False), torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    model = Model(0, module, list(module.parameters()), [0])
    step = SimpleNamespace(number=0, optimizer=lambda: torch.optim.SGD([other], lr=0.1))
    module(torch.ones(1, 2)).sum().backward()
    OptimizerCoverage.current._backward_ends(recorder, SimpleNamespace(models=[model]))
    if by_hand:
        module.weight.data.add_(module.weight.grad, alpha=-0.1)
    for _ in range(2):
        optimizer_coverage._compare(
            recorder, module, OptimizerCoverage.current._watches[model], {}, step
        )
    assert told == ([] if by_hand else [["weight"]])


def test_of_several_optimizers_the_one_that_holds_most_of_the_model(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    few = torch.optim.SGD([net[0].bias])
    most = torch.optim.SGD([net[0].weight, net[1].bias])
    monkeypatch.setattr(Optimizers.current, "made", lambda: [few, most])
    mine = {id(p): p for p in net.parameters()}
    assert optimizer_coverage._optimizer_to_name(few, mine) is most
    few.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert optimizer_coverage._optimizer_to_name(most, mine) is few
    assert (
        optimizer_coverage._optimizer_to_name(few, {0: torch.nn.Parameter(torch.zeros(7))}) is few
    )


@pytest.mark.parametrize("same", [True, False])
def test_where_none_holds_any_of_the_model_it_is_the_one_with_a_copy(monkeypatch, same):
    net = torch.nn.Linear(2, 1)
    copy = deepcopy(net) if same else torch.nn.Linear(3, 1)
    others = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 2))])
    of_copy = torch.optim.Adam(copy.parameters())
    monkeypatch.setattr(Optimizers.current, "made", lambda: [others, of_copy])
    mine = {id(p): p for p in net.parameters()}
    assert optimizer_coverage._optimizer_to_name(others, mine) is (of_copy if same else others)
