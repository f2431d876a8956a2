"""How a flat tensor holds gradients: one after the other, or each at its place in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .limits import HEAD, HEADS_TRIED, SAME_FACTOR

PACKED = "packed"
"""The gradients that exist, one after the other."""
WHOLE = "whole"
"""Every parameter has its place, also one without a gradient."""


def flat_layout(flat: Any, parameters: Sequence[Any]) -> str:
    """`PACKED` or `WHOLE`; empty where the tensor holds something else, or no parameter without a
    gradient stands before one that has one.

    The gradients may have another type in it, and be multiplied by a number.

    Args:
        flat: one dimension, on the CPU; the gradients begin with its first element.
        parameters: in the order in which their gradients are put together.
    """
    packed = whole = 0
    places = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            if packed != whole:
                places.append((gradient, packed, whole))
            packed += gradient.numel()
        whole += parameter.numel()
    for gradient, behind, own in places[-HEADS_TRIED:]:
        for begin, layout in ((behind, PACKED), (own, WHOLE)):
            if _begins_like(flat[begin:], gradient):
                return layout
    return ""


def _begins_like(flat: Any, gradient: Any) -> bool:
    """Whether it begins with the first values of a gradient, all multiplied by one number."""
    wanted = gradient.detach().reshape(-1)[:HEAD].tolist()
    pairs = list(zip(flat[: len(wanted)].tolist(), wanted, strict=False))
    ratios = [a / b for a, b in pairs if b]
    different = len({b for _, b in pairs if b}) > 1 and len(pairs) == len(wanted)
    return different and all(
        r and abs(r - ratios[0]) <= SAME_FACTOR * abs(ratios[0]) for r in ratios
    )
