"""DDP409: which losses are means that are multiplied by the world size, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from ddpdoctor.probe.source.division import multiplied_by_world_size
from ddpdoctor.probe.watchers.losses.multiplied_loss import multiplication

LABELS = torch.arange(16) % 3
MASK = (LABELS != 2).float()
COUNT = (LABELS != 2).sum()
WORLD = 2


class Gathers(torch.autograd.Function):
    """Stands for a function that brings in the values of other ranks."""

    @staticmethod
    def forward(ctx, x):
        return torch.cat([x, x])

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:16]


def found(loss, size=WORLD):
    outputs = (torch.randn(16, 3, requires_grad=True) * 1.5).relu()
    return multiplication(loss(outputs).grad_fn, size, (16,)) is not None


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS) * WORLD,
        lambda x: (WORLD * F.cross_entropy(x, LABELS)).squeeze(),
        lambda x: F.mse_loss(x, torch.zeros(16, 3)) * torch.tensor(WORLD),
        lambda x: (F.cross_entropy(x, LABELS) + 0.3 * x.square().mean()) * WORLD,
        lambda x: x.square().sum(1).mean() * WORLD,
        lambda x: (x.square().mean() + 1).sqrt() * WORLD,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 16 * WORLD,
        lambda x: (F.cross_entropy(x, LABELS) + x.square().sum() / x.numel()) * WORLD,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum", ignore_index=2) / COUNT * WORLD,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum", ignore_index=2) * (WORLD / COUNT),
        lambda x: (x.square().mean(1) * MASK).sum() / MASK.sum() * WORLD,
    ],
)
def test_means_over_samples(loss):
    assert found(loss)
    assert not found(loss, size=4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS),
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") * WORLD,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") * WORLD / 32,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum", ignore_index=2) / 20 * WORLD,
        lambda x: (x.square().mean(1) * MASK).sum() / (MASK.sum() + 7) * WORLD,
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 16,
        lambda x: F.cross_entropy(x, LABELS) / 4 * WORLD,
        lambda x: F.cross_entropy(x, LABELS) / WORLD * WORLD,
        lambda x: F.cross_entropy(x, LABELS) * WORLD * WORLD,
        lambda x: (F.cross_entropy(x, LABELS) + x.mean()) * 16 * WORLD,
        lambda x: (F.cross_entropy(x, LABELS) * 16 + x.mean() * 16) * WORLD,
        lambda x: (F.cross_entropy(x, LABELS) / 2 + x.mean() / 2) * WORLD,
        lambda x: (F.cross_entropy(x, LABELS) + x.square().sum()) * WORLD,
        lambda x: (x / 32).mean() * WORLD,
        lambda x: x.square().sum(0).mean() * WORLD,
        lambda x: F.cross_entropy(x, LABELS) * x.mean() * WORLD,
        lambda x: Gathers.apply(x).mean() * WORLD,
        lambda x: (x.mean() + (Gathers.apply(x) - 1).square().mean()) * WORLD,
    ],
)
def test_losses_whose_sum_over_the_ranks_may_be_wanted(loss):
    assert not found(loss)


@pytest.mark.parametrize(("line", "said"), [
    ("loss = loss * world_size", "world_size"),
    ("loss *= self.world_size", "self.world_size"),
    ("loss = loss.mul(dist.get_world_size())", "dist.get_world_size()"),
    ("loss = loss * 2", ""),
    ("loss = loss / world_size", ""),
    ("loss = loss * weight", ""),
])  # fmt: skip
def test_the_factor_as_written(tmp_path, line, said):
    (tmp_path / "train.py").write_text(line + "\n")
    assert multiplied_by_world_size(str(tmp_path / "train.py"), 1) == said
