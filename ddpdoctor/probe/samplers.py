"""What loaders and samplers say of themselves, whatever their classes."""

from __future__ import annotations

from typing import Any


def innermost(loader: Any) -> Any:
    """The sampler that chooses the samples, beneath batch samplers and wrappers."""
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(5):
        inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        if inner is None or hasattr(sampler, "num_replicas"):
            break
        sampler = inner
    return sampler


def weak(value: Any) -> bool:
    """Whether it can be a key of a weak dictionary (a list used as a sampler cannot)."""
    return hasattr(value, "__weakref__") and getattr(type(value), "__hash__", None) is not None


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def integer_of(owner: Any, name: str) -> int:
    found = integer(getattr(owner, name, None))
    return -1 if found is None else found


def length(of: Any) -> int:
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return -1
