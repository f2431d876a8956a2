"""Whether gradients have changed, by torch's version counters: cheap, as no value is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LOOKED_AT = 4
"""Gradients that stand for those of a model: a backward that reaches none of four spread over it
does not reach the model."""
NO_GRADIENT = (0, -1)


def some(every: Sequence[T]) -> list[T]:
    """About `LOOKED_AT` items of a sequence, evenly spread, the last one among them."""
    step = max(1, -(-len(every) // LOOKED_AT))
    return [*every[:-1:step], *every[-1:]]


def memory_of(tensor: Any) -> int:
    """The address of a tensor's storage (of the values, for a sparse one). For a tensor without
    storage, a negative number of its own."""
    try:
        dense = tensor._values() if tensor.is_sparse else tensor
        return int(dense.untyped_storage().data_ptr())
    except (RuntimeError, AttributeError):
        return -id(tensor)


def versions(parameters: Iterable[Any]) -> list[tuple[int, int]]:
    """(id, version) of the gradient of each parameter; `NO_GRADIENT` if it has none.

    Args:
        parameters: weak references to them.
    """
    return [version(reference()) for reference in parameters]


def version(parameter: Any) -> tuple[int, int]:
    """(id, version) of the gradient of a parameter; `NO_GRADIENT` if it has none, or for None."""
    grad = None if parameter is None else parameter.grad
    return NO_GRADIENT if grad is None else (id(grad), grad._version)
