"""The autograd graph: the leaves that it reaches, and the constant that one of its nodes multiplies
or divides by, such as the world size that a loss was divided by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..recording.torch_compat import saved


def leaves_of(roots: Iterable[Any], most: int) -> dict[int, Any] | None:
    """The leaves that a backward from these tensors reaches, by `id`; None where that would take a
    look at more than `most` nodes. What is inside of a reentrant checkpoint is not seen."""
    seen: set[Any] = set()
    open_ = [root.grad_fn for root in roots]
    found: dict[int, Any] = {}
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        if len(seen) >= most:
            return None
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        open_ += [following for following, _ in node.next_functions]
    return found


def divisor_of(node: Any) -> float:
    """The number that a node divides by; 0 if it does not divide by a single number on the CPU."""
    other = _number(node)
    if other is None or not other.is_cpu:
        return 0.0
    value = float(other)
    if node.name().startswith("Mul"):
        value = round(1 / value, 9) if value else 0.0  # a factor of 1/3 in float32 is 0.33333334
    return value


def is_of_a_device(node: Any) -> bool:
    """Whether a node multiplies or divides by a number on a device, which is not read: that would
    wait for the device."""
    other = _number(node)
    return other is not None and not other.is_cpu


def _number(node: Any) -> Any:
    """The single number that a node multiplies or divides by, as a tensor without dimensions; None
    if there is none, or it is a plain number, which functions of torch use internally."""
    if not node.name().startswith(("DivBackward", "MulBackward")):
        return None
    try:
        other = saved(node, "_saved_other")
    except LookupError:
        return None
    if other is None or isinstance(other, (int, float)):
        return None
    return None if other.dim() or other.requires_grad else other
