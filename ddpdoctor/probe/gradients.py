"""Whether gradients changed: cheap to ask of a few of them, without reading a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

LOOKED_AT = 4


def some(every: Sequence[T]) -> list[T]:
    """A few of them, spread evenly, with the last."""
    step = max(1, -(-len(every) // LOOKED_AT))
    return [*every[:-1:step], *every[-1:]]


def versions(parameters: Iterable[Any]) -> list[tuple[int, int]]:
    """Identity and version of each parameter's gradient; (0, -1) where there is none.

    Args:
        parameters: weak references.
    """
    found = []
    for reference in parameters:  # a plain loop: this runs twice in every backward
        parameter = reference()
        grad = None if parameter is None else parameter.grad
        found.append((0, -1) if grad is None else (id(grad), grad._version))
    return found
