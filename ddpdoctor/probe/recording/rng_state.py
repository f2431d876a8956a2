"""The global random generators: read, never advanced."""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from typing import Any, NamedTuple

NAMES = ("torch", "numpy", "random")

WORDS = 624
"""Numbers in the state of a Mersenne twister; all three generators are one."""


class Position(NamedTuple):
    """Where a generator stands: a digest of its state, and how much of that it has used up."""

    words: int
    used: int


UNKNOWN = Position(0, 0)


def positions() -> tuple[Position, Position, Position]:
    """Of torch's generator for the CPU, numpy's and Python's."""
    return _torch(), _numpy(), _python()


def digests(found: tuple[Position, ...]) -> tuple[int, int, int]:
    """One number each: equal where the generators would go on alike."""
    torch, numpy, python = (p.words ^ (p.used * 2654435761 & 0xFFFFFFFF) for p in found)
    return torch, numpy, python


def drawn(before: tuple[Position, ...], after: tuple[Position, ...]) -> int:
    """How many numbers were drawn in between, at least."""
    total = 0
    for old, new in zip(before, after, strict=True):
        if old.words == new.words:
            total += max(0, new.used - old.used)
        else:  # the state was renewed, once at least
            total += max(1, new.used + WORDS - old.used)
    return total


def _torch() -> Position:
    import torch

    state = torch.default_generator.get_state()
    if state.numel() < 24 + 8 * WORDS:
        return UNKNOWN
    # seed (8 bytes), left (4), seeded (4), next (8), 624 words of 8 bytes
    content = ctypes.string_at(state.data_ptr(), 24 + 8 * WORDS)
    left = int.from_bytes(content[8:12], sys.byteorder)
    return Position(zlib.crc32(content[24:]), WORDS - left)


def _numpy() -> Position:
    numpy: Any = sys.modules.get("numpy")
    legacy = sys.modules.get("numpy.random")
    if numpy is None or legacy is None:
        return UNKNOWN
    state = legacy.get_state(legacy=False)
    inner = state["state"]
    if "pos" not in inner:
        return UNKNOWN
    return Position(zlib.crc32(inner["key"].tobytes()), int(inner["pos"]))


def _python() -> Position:
    state = random.getstate()[1]
    return Position(hash(state[:-1]) & 0xFFFFFFFF, state[-1])
