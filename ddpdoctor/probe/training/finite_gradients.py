"""Whether a gradient is finite, and which gradients to sample: a NaN in the loss reaches nearly all
parameters, so a few small ones stand for the others."""

from __future__ import annotations

import math
from typing import Any

from ..tensors.digests import finite
from ..tensors.tensor_watch import spread
from .limits import FIRST_PARAMETERS, LARGEST, MOST_LOOKED_AT
from .tracked_model import Model


def finite_gradient(gradient: Any) -> bool:
    """Whether all elements of a gradient are finite: `digests.finite`, with a short cut for plain
    dense tensors."""
    import torch

    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return (plain and math.isfinite(gradient.sum().item())) or finite(gradient)


def sampled_positions(model: Model) -> list[int]:
    """Positions of the parameters whose gradients are sampled.

    The smallest of the first ones, which a backward reaches last, after most others; then biases,
    and weights without one, `MOST_LOOKED_AT` at most, evenly spread.
    """
    there = ((i, model.parameters[i]()) for i in model.expected)
    sizes = {i: p.numel() for i, p in there if p is not None and p.requires_grad}
    if not sizes:
        return []
    first = [i for i in model.expected[:FIRST_PARAMETERS] if i in sizes] or list(sizes)
    early = min(first, key=lambda i: sizes[i])
    paired = {
        n.removesuffix("bias") + "weight" for i in sizes if (n := model.names[i]).endswith("bias")
    }
    alone = [i for i in sizes if model.names[i] not in paired]
    few = spread(alone, MOST_LOOKED_AT)
    return [early, *(i for i in few if i != early and sizes[i] <= LARGEST)]
