"""A rank's own gradients, before they are averaged: which of them tell of the others."""

from __future__ import annotations

import math
from typing import Any

from ..tensors.digests import finite
from .tracked_model import Model

FIRST_PARAMETERS = 4
MOST_LOOKED_AT, LARGEST = 32, 1 << 20
"""Parameters, and elements of each."""


def finite_gradient(gradient: Any) -> bool:
    """As `finite`, which asks much of a tensor."""
    import torch

    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return (plain and math.isfinite(gradient.sum().item())) or finite(gradient)


def sampled_positions(model: Model) -> list[int]:
    """Positions of those whose gradients tell of the others': a small one among the first, as what
    comes from the loss passes most others before it; then of each pair of a weight and a bias the
    bias, and what stands alone, as many as `MOST_LOOKED_AT`."""
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
    alone = alone[:: -(-len(alone) // MOST_LOOKED_AT)]
    return [early, *(i for i in alone if i != early and sizes[i] <= LARGEST)]
