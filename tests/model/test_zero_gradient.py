"""DDP308: zero at every step looked at, and decayed or moved."""

import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from ddpdoctor.checks.model.zero_gradient import ZeroGradient
from recordings import make_run, steps
from wraps import codes, rank, wrap

from ddpdoctor.events import Submodule, ZeroGradients
from ddpdoctor.events.amp import told_at
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.training.records import OptimizerModel
from ddpdoctor.probe.watchers.gradients.zero_gradients import ZeroGradientWatch

CHECK = ZeroGradient()


def zeros(samples=4, decay=0.1, indices=(4, 5), beside=()):
    return ZeroGradients(
        at=0, model=0, optimizer=0, step=8, samples=samples, indices=indices, weight_decay=decay,
        beside=beside,
    )  # fmt: skip


def seen(monkeypatch, optimizer, weight, *, steps, alive=()):
    """What is told of a run; `weight` is by what the gradients are multiplied at a step,
    but for those of the `alive`."""
    told: list[ZeroGradients] = []
    recorder: Any = SimpleNamespace(emit=told.append)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    every = list(range(len(parameters)))
    references = [weakref.ref(p) for p in parameters]
    names = [f"layer.{n}" for n in every]
    model: Any = SimpleNamespace(number=0, expected=every, parameters=references, names=names)
    holding = OptimizerModel(model, 0, every)
    step: Any = SimpleNamespace(holdings=[holding], optimizer=weakref.ref(optimizer))
    step.known = SimpleNamespace(notes={}, step=step)
    monkeypatch.setattr(Optimizers.current, "known", lambda: [step.known])
    monkeypatch.setattr(
        ZeroGradientWatch.current, "_ends", SimpleNamespace(enable=lambda awake=True: None)
    )
    for step.number in range(steps):
        for n, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 1.0 if n in alive else weight(step.number))
        if told_at(step.number):
            ZeroGradientWatch.current._step_due(recorder, step)
        optimizer.step()
        ZeroGradientWatch.current._step_ends(recorder, step)
    ZeroGradientWatch.current._leaving(recorder, None)
    return told


def test_what_has_a_gradient_beside_it_is_told(monkeypatch):
    optimizer = torch.optim.SGD(weights(3), 0.1, weight_decay=0.1)
    told = seen(monkeypatch, optimizer, lambda step: 0.0, steps=9, alive=(2,))
    assert (told[-1].indices, told[-1].beside) == ((0, 1), (2,))


def weights(count=2):
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]


def test_a_decay_is_that_of_the_parameters_own_group(monkeypatch):
    decayed, other = weights()
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [other]}]
    told = seen(monkeypatch, torch.optim.SGD(groups, 0.1), lambda step: 0.0, steps=9)
    assert (told[-1].indices, told[-1].weight_decay, told[-1].moved) == ((0,), 0.1, ())


def test_momentum_from_before_moves_it(monkeypatch):
    optimizer = torch.optim.Adam(weights(), 0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    told = seen(monkeypatch, optimizer, lambda step: 0.0, steps=9)
    assert (told[-1].moved, told[-1].weight_decay) == ((0, 1), 0.0)


def test_nothing_moves_it(monkeypatch):
    assert seen(monkeypatch, torch.optim.Adam(weights(), 0.1), lambda step: 0.0, steps=40) == []


@pytest.mark.parametrize(
    "weight",
    [lambda step: step >= 12, lambda step: step == 39, lambda step: (step + 1) % 10 == 0],
    ids=["a warm-up", "the last step", "each tenth step"],
)
def test_a_gradient_that_comes_later(monkeypatch, weight):
    optimizer = torch.optim.AdamW(weights(), 0.1, weight_decay=0.1)
    told = seen(monkeypatch, optimizer, weight, steps=40)
    assert told[0].indices
    assert told[-1].indices == ()


def both(*events, wrapped=None):
    return make_run({r: rank(*events, *steps(9), wrapped=wrapped) for r in (0, 1)})


def test_a_head_that_is_cut_off():
    (found,) = CHECK.examine(both(zeros()))
    assert found.severity.value == "note"
    assert found.location.line == 12


def test_an_optimizer_inside_another_on_some_ranks_tells_the_same():
    inner = msgspec.structs.replace(zeros(), optimizer=0)
    outer = msgspec.structs.replace(zeros(), optimizer=1)
    run = make_run({0: rank(outer, *steps(9)), 1: rank(inner, outer, *steps(9))})
    (found,) = CHECK.examine(run)
    assert found.ranks == (0, 1)


def test_two_optimizers_of_which_each_has_its_own():
    other = msgspec.structs.replace(zeros(indices=(2, 3)), optimizer=1)
    assert len(list(CHECK.examine(both(zeros(), other)))) == 2


def test_a_bias_whose_weight_has_a_gradient_cancels_out():
    cut, cancels = CHECK.examine(both(zeros(indices=(2, 3, 5), beside=(4,))))
    assert (cut.subjects, cancels.subjects) == (("head.weight", "head.bias"), ("aux.bias",))


def test_a_weight_beside_a_bias_with_a_gradient_is_not_the_whole_module():
    (found,) = CHECK.examine(both(zeros(indices=(4,), beside=(5,))))
    assert found.rule == "zero-factor"


def test_without_decay_nothing_is_lost():
    assert codes(both(zeros(decay=0.0)), CHECK) == []


def test_the_cause_is_what_changes_them():
    moved = msgspec.structs.replace(zeros(decay=0.0), moved=(4, 5))
    (decayed,), (moved_by,) = CHECK.examine(both(zeros())), CHECK.examine(both(moved))
    assert decayed.rule == "zero-factor"
    assert moved_by.rule == "zero-factor"


def test_too_few_steps():
    assert codes(both(zeros(samples=3)), CHECK) == []


def test_rows_of_an_embedding():
    plain = wrap()
    modules = [
        msgspec.structs.replace(m, kind="Embedding") if m.name == "aux" else m
        for m in plain.modules
    ]
    assert isinstance(modules[0], Submodule)
    embedding = msgspec.structs.replace(plain, modules=tuple(modules))
    assert codes(both(zeros(), wrapped=embedding), CHECK) == []


def test_gradients_that_came_back():
    assert codes(both(zeros(), zeros(samples=5, indices=())), CHECK) == []
