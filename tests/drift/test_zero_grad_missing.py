"""DDP411 on literal events."""

from ddpdoctor.checks.drift.zero_grad_missing import ZeroGradMissing
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


def test_two_steps_are_too_few():
    assert list(ZeroGradMissing().examine(run(carried(1), count=2))) == []


def test_nothing_to_judge():
    assert ZeroGradMissing().unobserved(run()) is not None


def test_cleared_on_some_ranks_only():
    lines = [site(1, "train.py", 9, "optimizer.step()"), site(2, "train.py", 8, "loss.backward()")]
    told = {0: carried(1, value=False), 1: carried(1), 2: carried(1)}
    ranks = {n: [*lines, event, *steps(6)] for n, event in told.items()}
    (finding,) = ZeroGradMissing().examine(make_run(ranks))
    assert "never cleared on ranks 1-2" in finding.summary
    assert "rank 0 clears it between steps, ranks 1-2 never" in finding.cause
    assert "nothing clears" not in finding.cause
    assert "on every rank" in finding.fix


def test_a_gradient_whose_memory_was_given_back_is_not_read():
    import weakref

    import torch

    from ddpdoctor.probe.clearing import _any_value

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert _any_value(weakref.ref(parameter)) is True
    parameter.grad.untyped_storage().resize_(0)
    assert _any_value(weakref.ref(parameter)) is None
