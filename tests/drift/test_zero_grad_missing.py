"""DDP411 on literal events, and what the probe makes of gradients that are cleared, or not."""

from types import SimpleNamespace

import pytest
from ddpdoctor.checks.drift.zero_grad_missing import ZeroGradMissing
from firing import alone
from recordings import make_run, site, steps

from ddpdoctor.events import Carried


def carried(step, value=True, optimizer=0):
    return Carried(at=0, optimizer=optimizer, step=step, carried=value, site=1, backward_site=2)


def run(*events, count=6):
    lines = [site(1, "train.py", 9, "optimizer.step()"), site(2, "train.py", 8, "loss.backward()")]
    return make_run({n: [*lines, *events, *steps(count)] for n in range(2)})


def test_never_cleared():
    (finding,) = ZeroGradMissing().examine(run(carried(1)))
    assert (finding.ranks, finding.location.line) == ((0, 1), 9)
    assert finding.steps.count == 5
    assert finding.related[0].location.line == 8


def test_cleared():
    assert list(ZeroGradMissing().examine(run(carried(1, value=False)))) == []


def test_cleared_in_some_steps():
    assert list(ZeroGradMissing().examine(run(carried(1), carried(3, value=False)))) == []


def test_only_the_optimizer_that_is_never_cleared():
    (finding,) = ZeroGradMissing().examine(run(carried(1, value=False, optimizer=1), carried(1)))
    assert finding.steps.first == 1


def test_not_cleared_any_more():
    cleared = [carried(1, value=False), carried(5, value=False)]
    (finding,) = ZeroGradMissing().examine(run(*cleared, carried(6), count=12))
    assert (finding.steps.first, finding.steps.count) == (6, 6)
    again = [carried(1, value=False), carried(6), carried(10, value=False)]
    assert list(ZeroGradMissing().examine(run(*again, count=12))) == []


def test_not_cleared_any_more_since_a_step_that_was_not_looked_at():
    told = [carried(1, value=False), carried(397, value=False), carried(401)]
    (finding,) = ZeroGradMissing().examine(run(*told, count=600))
    assert finding.evidence["steps_with_old_gradients"] == "199 of 600, or up to 202"
    assert finding.steps.first == 401


def test_two_steps_are_too_few():
    assert list(ZeroGradMissing().examine(run(carried(1), count=2))) == []


def test_nothing_to_judge():
    assert ZeroGradMissing().unobserved(run()) is not None


def test_cleared_on_some_ranks_only():
    lines = [site(1, "train.py", 9, "optimizer.step()"), site(2, "train.py", 8, "loss.backward()")]
    told = {0: carried(1, value=False), 1: carried(1), 2: carried(1)}
    ranks = {n: [*lines, event, *steps(6)] for n, event in told.items()}
    (finding,) = ZeroGradMissing().examine(make_run(ranks))
    assert (finding.rule, finding.ranks) == ("never-cleared", (1, 2))


def test_a_gradient_whose_memory_was_given_back_is_not_read():
    import weakref

    import torch

    from ddpdoctor.probe.watchers.gradients.zero_grad import _any_value

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert _any_value(weakref.ref(parameter)) is True
    parameter.grad.untyped_storage().resize_(0)
    assert _any_value(weakref.ref(parameter)) is None


def dropped(optimizer):
    optimizer.zero_grad()


def zeroed(optimizer):
    """Clears gradients behind torch's back."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.data.zero_()


def judged(clears, steps, monkeypatch, due=lambda step: True, clear=dropped, others=0):
    """What is told of an optimizer whose gradients are cleared before some steps; `others` are
    backwards before that, of another loss."""
    import torch

    from ddpdoctor.probe.training import lifecycle
    from ddpdoctor.probe.watchers.gradients.zero_grad import ZeroGrad

    alone(monkeypatch, ZeroGrad)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    told, known = [], SimpleNamespace(notes={}, number=0)
    recorder, backward = SimpleNamespace(emit=told.append), SimpleNamespace(site=2)
    for number in range(steps):
        step = SimpleNamespace(
            number=number, known=known, site=1, closure=False, due=due(number),
            optimizer=lambda: optimizer,
        )  # fmt: skip
        for left in range(others, -1, -1):
            if clears(number) and not left:
                clear(optimizer)
            lifecycle.backward_begins.fire(recorder, backward)
            (parameter * parameter).sum().backward()
            lifecycle.backward_ends.fire(recorder, backward)
        lifecycle.step_begins.fire(recorder, step)
        if step.due:
            lifecycle.step_due.fire(recorder, step)
        optimizer.step()
        lifecycle.step_ends.fire(recorder, step)
    return [(e.step, e.carried) for e in told]


@pytest.mark.parametrize(
    ("clears", "told"),
    [
        (lambda n: False, [(1, True)]),
        (lambda n: True, [(1, False)]),
        (lambda n: n < 6, [(1, False), (5, False), (6, True)]),
        (lambda n: n < 6 or n == 11, [(1, False), (5, False), (6, True), (11, False)]),
        (lambda n: n < 9, [(1, False)]),
        (lambda n: n < 3, [(1, False)]),
        (lambda n: n < 6 or n % 3 == 0, [(1, False)]),
        (lambda n: n % 3 == 0, [(1, True), (3, False)]),
    ],
    ids=["never", "always", "no more", "once more", "too late", "too soon", "windows", "in some"],
)
def test_clearing_that_ends(clears, told, monkeypatch):
    assert judged(clears, 12, monkeypatch) == told


def test_later_only_some_steps_are_looked_at(monkeypatch):
    assert judged(lambda n: n < 70, 128, monkeypatch, lambda n: n < 8 or n % 32 == 0) == [
        (1, False), (65, False), (97, True),
    ]  # fmt: skip
    assert judged(lambda n: n < 70 or n % 9 == 0, 128, monkeypatch, lambda n: n % 32 == 0) == [
        (1, False)
    ]


class Copy:
    """A number on its way from a device, there after some questions."""

    def __init__(self, number, after):
        self.host, self.after = number, after

    def arrived(self):
        self.after -= 1
        return self.after < 0


@pytest.mark.parametrize(
    ("clears", "after", "told"),
    [
        (lambda n: True, 0, [(1, False)]),
        (lambda n: False, 0, [(1, True)]),
        (lambda n: True, 3, [(1, False)]),
        (lambda n: False, 3, [(1, True)]),
        (lambda n: True, 99, []),
    ],
    ids=["zeroed", "kept", "zeroed, late", "kept, late", "never answered"],
)
def test_gradients_on_a_device_that_are_zeroed_behind_torchs_back(clears, after, told, monkeypatch):
    """`p.grad.data.zero_()` leaves no trace but the values, which the device tells later."""
    from ddpdoctor.probe.watchers.gradients import zero_grad

    monkeypatch.setattr(zero_grad, "readable", lambda tensor: False)
    monkeypatch.setattr(
        zero_grad, "largest_later", lambda grad: Copy(float(grad.abs().max()), after)
    )
    assert judged(clears, 12, monkeypatch, clear=zeroed) == told


@pytest.mark.parametrize(
    ("clears", "others", "told"),
    [
        (lambda n: True, 1, [(1, False)]),
        (lambda n: False, 1, [(1, True)]),
        (lambda n: False, 40, []),
    ],
    ids=["zeroed", "kept", "more than are asked"],
)
def test_zeroed_on_a_device_between_two_backwards(clears, others, told, monkeypatch):
    """A GAN's loss of the generator leaves gradients in the discriminator."""
    from ddpdoctor.probe.watchers.gradients import zero_grad

    monkeypatch.setattr(zero_grad, "readable", lambda tensor: False)
    monkeypatch.setattr(zero_grad, "largest_later", lambda grad: Copy(float(grad.abs().max()), 0))
    assert judged(clears, 12, monkeypatch, clear=zeroed, others=others) == told


def test_gradients_that_no_device_tells_are_not_judged(monkeypatch):
    from ddpdoctor.probe.watchers.gradients import zero_grad

    monkeypatch.setattr(zero_grad, "readable", lambda tensor: False)
    assert judged(lambda n: False, 12, monkeypatch) == []
