"""A bounded sample of a growing set of indices, chosen in the same way on every rank.

Kept are the indices whose hash begins with so many zero bits; one more bit halves the share.
"""

from __future__ import annotations

import zlib
from typing import Any

SCATTER = 2654435761
"""Knuth's multiplicative hash: its high bits are spread evenly, also for strided indices."""


def halvings(count: int, limit: int) -> int:
    """How often the share must be halved to keep at most about `limit` of `count` indices."""
    return (count // limit).bit_length()


def kept(index: int, halved: int) -> bool:
    """Whether an index belongs to the sample of one in `2 ** halved`."""
    return (index * SCATTER & 0xFFFFFFFF) >> (32 - halved) == 0 if halved else True


def key(index: Any) -> int | None:
    """What a sampler yielded, as a number: an index itself, a hash of anything else; None for
    None, which stands for the samples of an iterable data set."""
    if index is None:
        return None
    try:
        return int(index.__index__())
    except (AttributeError, TypeError):
        return zlib.crc32(repr(index).encode())
