"""What a node of the autograd graph multiplies or divides by."""

from __future__ import annotations

from typing import Any

from ..recording.torch_compat import saved


def divisor_of(node: Any) -> float:
    """What a node divides by: a plain number, or 0."""
    other = _number(node)
    if other is None or not other.is_cpu:
        return 0.0
    value = float(other)
    if node.name().startswith("Mul"):
        value = round(1 / value, 9) if value else 0.0
    return value


def is_of_a_device(node: Any) -> bool:
    """Whether a node multiplies or divides by a number that lies on a device: it is not read."""
    other = _number(node)
    return other is not None and not other.is_cpu


def _number(node: Any) -> Any:
    """The one number that a node multiplies or divides by, as a tensor; None where it does not, or
    where a function of torch does it in itself: then it is a plain number."""
    if not node.name().startswith(("DivBackward", "MulBackward")):
        return None
    try:
        other = saved(node, "_saved_other")
    except LookupError:
        return None
    if other is None or isinstance(other, (int, float)):
        return None
    return None if other.dim() or other.requires_grad else other
