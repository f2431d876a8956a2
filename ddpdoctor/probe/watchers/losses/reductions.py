"""What a node of a loss reduces: over how many elements, and how many of them count."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import Any

from ...recording.torch_compat import saved
from ...tensors.autograd_nodes import SIZES, divisor_of, is_of_a_device, reduction_of, terms_of
from .limits import TERM_NODES


def valid_elements(node: Any, reduction: str, weight: float) -> int:
    """How many elements count in a loss, where that is known and some do not.

    Args:
        node: the one that reduces it.
        weight: what a sum is multiplied by afterwards: a mean by hand divides by the count.
    """
    if reduction == "sum":
        count, elements = 1 / weight if weight else 0.0, prod(_sizes_reduced(node))
        whole = abs(count - round(count)) < 1e-4 * count
        return round(count) if whole and 1 < count < elements else 0
    if reduction != "mean":
        return 0
    if not node.name().startswith("Nll"):
        ahead = next((n for n, _ in node.next_functions if n is not None), None)
        selects = ahead is not None and ahead.name().startswith(("Index", "MaskedSelect"))
        return prod(_sizes_reduced(node)) if selects else 0
    count, of = _targets(node)
    return count if count < of else 0


def _targets(node: Any) -> tuple[int, int]:
    """How many targets of a mean over classes are not ignored, and how many there are; (0, 1) where
    that cannot be read, or classes have weights."""
    try:
        if getattr(node, "_saved_weight", None) is not None:
            return 0, 1
        counted, target = saved(node, "_saved_total_weight"), saved(node, "_saved_target")
    except (LookupError, AttributeError):
        return 0, 1
    return (int(counted), target.numel()) if counted.is_cpu else (0, 1)


def elements_counted(node: Any) -> float:
    """How many elements count in a sum: all, those that a mask of numbers or booleans selects, or
    the targets that are not ignored; 0 if unknown."""
    if node.name().startswith("Nll"):
        return float(_targets(node)[0])
    ahead = next((n for n, _ in node.next_functions if n is not None), None)
    if ahead is not None and ahead.name().startswith("MulBackward"):
        try:
            mask = saved(ahead, "_saved_other")
        except LookupError:
            return 0.0
        if mask is not None and mask.is_cpu and not mask.requires_grad and mask.numel() > 1:
            return float(mask.sum())
    return float(prod(_sizes_reduced(node)))


def means_of(root: Any) -> tuple[tuple[int, float], ...]:
    """How many elements each mean in a loss is taken over, and by what it is multiplied then: 0
    also where some elements do not count, which `valid_elements` is about."""
    found = []
    for path in terms_of(root, TERM_NODES):
        weight = 1.0
        for node in path:
            weight = 0.0 if is_of_a_device(node) else weight / (divisor_of(node) or 1.0)
            if kind := reduction_of(node):
                if kind == "mean" and (sizes := _sizes(node)) and isfinite(weight):
                    if node.name().startswith("Nll"):
                        counted, of = _targets(node)
                        weight *= counted == of
                    found.append((prod(sizes), float(f"{weight:.6g}")))
                break
    return tuple(found)


def mean_divisor(node: Any, reduction: str) -> int:
    """By what to divide the result of a node to get a mean: 1 if it is one, 0 if unknown or if the
    node does not reduce."""
    if reduction != "sum":
        return int(reduction == "mean")
    sizes = _sizes(node)
    return prod(sizes) if sizes else 0


def _sizes(node: Any) -> list[int]:
    """Shape of the elements that a node reduces; empty if unknown."""
    sizes = list(_sizes_reduced(node))
    if node.name().startswith("Nll"):
        del sizes[1:2]  # classes, of which each place has one
    return sizes


def rows_of(node: Any) -> int:
    """Leading size of the tensor that a node reduces; 0 if unknown."""
    sizes = _sizes_reduced(node)
    return int(sizes[0]) if sizes else 0


def _sizes_reduced(node: Any) -> Sequence[int]:
    """Shape of the tensor that a node reduces; empty if unknown."""
    sizes = getattr(node, SIZES, None)
    if sizes is None:
        try:
            sizes = saved(node, "_saved_self").shape
        except (LookupError, AttributeError):
            return ()
    return tuple(int(size) for size in sizes)
