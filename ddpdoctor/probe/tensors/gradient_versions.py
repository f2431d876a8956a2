"""Where gradients lie, and whether they changed: cheap to ask, without reading a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LOOKED_AT = 4
NO_GRADIENT = (0, -1)


def some(every: Sequence[T]) -> list[T]:
    """A few of them, spread evenly, with the last."""
    step = max(1, -(-len(every) // LOOKED_AT))
    return [*every[:-1:step], *every[-1:]]


def memory_of(tensor: Any) -> int:
    """The address of a tensor's memory; of a sparse one that of its values. What has none is only
    equal to itself."""
    try:
        dense = tensor._values() if tensor.is_sparse else tensor
        return int(dense.untyped_storage().data_ptr())
    except (RuntimeError, AttributeError):
        return -id(tensor)


def versions(parameters: Iterable[Any]) -> list[tuple[int, int]]:
    """Identity and version of each parameter's gradient; `NO_GRADIENT` where there is none.

    Args:
        parameters: weak references.
    """
    return [version(reference()) for reference in parameters]


def version(parameter: Any) -> tuple[int, int]:
    """The same of one parameter, or of None."""
    grad = None if parameter is None else parameter.grad
    return NO_GRADIENT if grad is None else (id(grad), grad._version)
