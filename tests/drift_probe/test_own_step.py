"""Where an optimizer of the program's own defines its step, and what that writes to."""

from pathlib import Path

import torch

from ddpdoctor.probe.source import own_step

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
    writes = own_step.parameter_writes(Capped)
    assert [(w.target, LINES[w.line - 1].strip()) for w in writes] == [
        ("weights", "weights.clamp_(-1, 1)"),
        ("p", 'p.data.add_(buf, alpha=-group["lr"])'),
        ("self.layer.weight", "self.layer.weight.mul_(0.5)"),
    ]
    step = own_step.own_step(Capped)
    assert step is not None
    assert LINES[own_step.definition_line(step) - 1].strip() == "def step(self, closure=None):"


def test_a_step_of_torchs_is_not_the_programs_own():
    for kind in (torch.optim.SGD, Inherited):
        assert own_step.own_step(kind) is None
        assert own_step.parameter_writes(kind) == []
