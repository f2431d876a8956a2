"""A bounded sample of a growing set of indices, the same on every rank."""

from __future__ import annotations

import zlib
from typing import Any

SCATTER = 2654435761
"""Knuth's multiplicative hash: its high bits are spread evenly, also for strided indices."""


def halvings(count: int, limit: int) -> int:
    """How often the share that is kept was halved after `count`: 0 up to the limit."""
    return (count // limit).bit_length()


def kept(index: int, halved: int) -> bool:
    """Whether an index belongs to the subset of one in `2 ** halved`."""
    return (index * SCATTER & 0xFFFFFFFF) >> (32 - halved) == 0 if halved else True


def key(index: Any) -> int | None:
    """What a sampler yielded as a number; None where it is no index (iterable data sets)."""
    if index is None:
        return None
    try:
        return int(index.__index__())
    except (AttributeError, TypeError):
        return zlib.crc32(repr(index).encode())
