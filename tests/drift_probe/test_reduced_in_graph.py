"""DDP410: which graphs depend on a tensor that is all-reduced in place, or gathered."""

import pytest
import torch

from ddpdoctor.probe.tensors.autograd_nodes import leads_to
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.losses.gathered_in_graph import _parts, _put_back, _scaled_up
from ddpdoctor.probe.watchers.losses.loss_scaling import averaged
from ddpdoctor.probe.watchers.losses.reduced_in_graph import _is_linear


class Given(torch.autograd.Function):
    """A function whose gradient is the program's own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def found(loss, size=2):
    """Whether the loss that is made of the tensor shapes its gradient."""
    tensor = torch.randn(4, 4, requires_grad=True) * 3
    return _is_linear([loss(tensor).grad_fn], tensor.grad_fn, size) is False


@pytest.mark.parametrize(
    "loss",
    [
        lambda c: (c - 1).square().sum(),
        lambda c: c.diagonal().sum() + 0.1 * c.square().mean(),
        lambda c: c.exp().log().sum() / 3,
        lambda c: (c * c).sum(),
        lambda c: 2 * torch.ones(3, requires_grad=True).sum() + c.square().sum(),
    ],
)
def test_losses_that_are_not_linear_in_the_sum(loss):
    assert found(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda c: (c * torch.randn(4)).mean(0)[1:].sum() / 4,
        lambda c: c.T.reshape(-1).sum() + torch.ones(3, requires_grad=True).square().sum(),
        lambda c: (c.detach() * torch.ones(4, requires_grad=True)).square().sum(),
        lambda c: c.square().sum() * 2,
        lambda c: Given.apply(c).square().sum(),
    ],
)
def test_losses_whose_gradient_is_right_or_unknown(loss):
    assert not found(loss)


def test_a_loss_that_is_the_sum_itself():
    loss = torch.randn(4, requires_grad=True).square().mean()
    summed, divided = loss.grad_fn, (loss / 2).grad_fn
    assert _is_linear([summed], summed, 2) is True
    assert _is_linear([divided], summed, 2) is True
    assert _is_linear([divided], torch.ones(1, requires_grad=True).exp().grad_fn, 2) is None


def test_a_product_with_another_number_than_the_world_size():
    assert found(lambda c: 2 * c.square().sum(), size=4)


def test_which_tensors_follow_from_the_parameters_of_a_model():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = Model(0, net, list(net.parameters()), [0, 1, 2, 3])
    assert leads_to(net(torch.ones(4)).relu().grad_fn, averaged(model))
    assert not leads_to(torch.ones(4, requires_grad=True).exp().grad_fn, averaged(model))


@pytest.mark.parametrize(("loss", "quiet"), [
    (lambda c: (c / 0.5).exp().mean(), False),  # a temperature, not the world size
    (lambda c: c.square().sum() / 32, False),
    (lambda c: c.mean(), False),
    (lambda c: c.exp().mean() * 2, True),
    (lambda c: (c.exp() * 2).mean() + 1, True),
    (lambda c: c.sum(), True),
    (lambda c: torch.ones(3, requires_grad=True).sum(), True),
])  # fmt: skip
def test_losses_of_gathered_tensors_that_are_scaled_or_summed(loss, quiet):
    tensor = torch.randn(4, 4, requires_grad=True) * 3
    assert _scaled_up([loss(tensor).grad_fn], tensor.grad_fn, 2) is quiet


def test_tensors_that_are_put_back_into_what_was_gathered():
    mine, other = torch.ones(4, 2, requires_grad=True) * 2, torch.ones(4, 2)
    for joined in (torch.cat([other, mine]), torch.stack([other, mine])):
        loss = joined.square().sum().grad_fn
        assert _put_back([loss], 2, 1) == [joined.grad_fn]
        assert _put_back([loss], 2, 0) == []
        assert _put_back([loss], 3, 1) == []
    both = torch.cat([mine, mine]).square().sum().grad_fn
    assert _put_back([both], 2, 1) == []


def test_which_part_of_the_gradient_is_given_back():
    whole = torch.arange(24.0).reshape(8, 3)
    parts = whole.chunk(2)

    def given(mine, gradients, rank=1, own=True):
        return _parts([mine], gradients, 2, rank, own=own) is not None

    assert given(parts[1], [whole]) and not given(parts[1], [whole], rank=0)
    assert given(parts[1], [None, parts[1]]) and given(parts[1], [torch.stack(parts)])
    assert given(whole.T.chunk(2, 1)[1], [whole.T]), "joined along another dimension"
    assert not given(parts[1] * 2, [whole]) and not given(None, [whole])
    assert _parts(parts, [whole], 2, 1, own=False) is not None
