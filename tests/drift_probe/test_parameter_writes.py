"""Where the program writes to parameters: in the step of an optimizer of its own, and where it
updates a copy of a model."""

import copy
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from ddpdoctor.probe.source import parameter_writes

LINES = Path(__file__).read_text().splitlines()


def limit(weights):
    weights.clamp_(-1, 1)


class Capped(torch.optim.Optimizer):
    def __init__(self, parameters, layer):
        super().__init__(parameters, {"lr": 0.1})
        self.layer = layer
        self.calls = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(0.9).add_(p.grad)
                p.grad.zero_()
                p.data.add_(buf, alpha=-group["lr"])
        self.calls.add_(1)
        self.cap()

    def cap(self):
        self.layer.weight.mul_(0.5)
        limit(self.layer.bias)

    def unused(self):
        self.layer.bias.zero_()


class Inherited(torch.optim.SGD):
    pass


def test_the_step_and_its_writes():
    writes = parameter_writes.parameter_writes(Capped)
    assert [(w.target, LINES[w.line - 1].strip()) for w in writes] == [
        ("weights", "weights.clamp_(-1, 1)"),
        ("p", 'p.data.add_(buf, alpha=-group["lr"])'),
        ("self.layer.weight", "self.layer.weight.mul_(0.5)"),
    ]
    step = parameter_writes.own_step(Capped)
    assert step is not None
    assert (
        LINES[parameter_writes.definition_line(step) - 1].strip() == "def step(self, closure=None):"
    )


def test_a_step_of_torchs_is_not_the_programs_own():
    for kind in (torch.optim.SGD, Inherited):
        assert parameter_writes.own_step(kind) is None
        assert parameter_writes.parameter_writes(kind) == []


@torch.no_grad()
def follow(averages, model, decay=0.9):
    kept = OrderedDict(averages.named_parameters())
    for name, value in model.named_parameters():
        kept[name].mul_(decay).add_(value.data, alpha=1 - decay)


class Averages:
    def __init__(self, model):
        self.module = copy.deepcopy(model)

    def update(self, model):
        with torch.no_grad():
            for mine, theirs in zip(
                self.module.state_dict().values(), model.state_dict().values(), strict=False
            ):
                mine.copy_(theirs)


def found(module):
    """The line that `update_in_frames` finds, and the calls that lead to it, as written."""
    got = parameter_writes.update_in_frames(
        sys._getframe(1), lambda code: code.co_filename == __file__, module
    )
    every = (got, *got.through) if got is not None else ()
    return [LINES[one.line - 1].strip() for one in every]


def here(model, teacher, rank):
    for _ in range(1):
        got = found(teacher)
        if rank == 0:
            for _, (mine, theirs) in enumerate(zip(teacher.parameters(), model.parameters())):  # noqa: B905
                theirs.data.mul_(1)
                mine.data.mul_(0.9).add_(theirs.detach().data)
    return got


def in_a_helper(model, teacher, rank):
    follow(teacher, model, decay=0)
    for _ in range(1):
        got = found(teacher)
        if rank == 0:
            follow(teacher, model)
    teacher.load_state_dict(model.state_dict())
    return got


def in_a_method(model, teacher, rank):
    averages = Averages(model)
    got = found(averages.module)
    averages.update(model)
    return got


def loaded(model, teacher, rank):
    got = found(teacher)
    teacher.load_state_dict(model.state_dict())
    return got


def of_a_layer(model, teacher, rank):
    got = found(teacher)
    teacher[0].weight.data.lerp_(model[0].weight.data, 0.1)
    return got


def by_a_library(model, teacher, rank):
    averages = torch.optim.swa_utils.AveragedModel(model)
    got = found(averages.module)
    averages.update_parameters(model)
    return got


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (here, ["mine.data.mul_(0.9).add_(theirs.detach().data)"]),
        (
            in_a_helper,
            [
                "kept[name].mul_(decay).add_(value.data, alpha=1 - decay)",
                "follow(teacher, model)",
            ],
        ),
        (in_a_method, ["mine.copy_(theirs)", "averages.update(model)"]),
        (loaded, ["teacher.load_state_dict(model.state_dict())"]),
        (of_a_layer, ["teacher[0].weight.data.lerp_(model[0].weight.data, 0.1)"]),
        (by_a_library, ["averages.update_parameters(model)"]),
    ],
)
def test_the_line_that_updates_a_copy_of_a_model(program, lines):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert program(model, copy.deepcopy(model), 0) == lines


def test_what_is_no_update_of_a_copy():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    teacher = copy.deepcopy(model)
    got = found(teacher)
    teacher.requires_grad_(False)
    wanted = teacher(torch.ones(1, 2))
    wanted.mul_(0.5)
    for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
        theirs.data.add_(mine.data)
    follow(model, teacher)
    assert got == []
