"""The states of the global random generators of torch (CPU), numpy and Python: whether two are
equal, and how much was drawn. They are read and never advanced."""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from typing import Any, NamedTuple

NAMES = ("torch", "numpy", "random")

WORDS = 624
"""Words in the state of a Mersenne twister, which all three generators are."""


class Position(NamedTuple):
    """The position of a generator: a digest of its words, and how many of them are used up."""

    words: int
    used: int


UNKNOWN = Position(0, 0)


def positions() -> tuple[Position, Position, Position]:
    """The positions of the generators of torch (CPU), numpy and Python."""
    return _torch(), _numpy(), _python()


def digests(found: tuple[Position, ...]) -> tuple[int, int, int]:
    """One number per generator, equal for generators that would draw the same numbers next."""
    torch, numpy, python = (p.words ^ (p.used * 2654435761 & 0xFFFFFFFF) for p in found)
    return torch, numpy, python


def drawn(before: tuple[Position, ...], after: tuple[Position, ...]) -> int:
    """A lower bound of the numbers drawn between two lists of positions."""
    total = 0
    for old, new in zip(before, after, strict=True):
        if old.words == new.words:
            total += max(0, new.used - old.used)
        else:  # the words were generated anew, at least once
            total += max(1, new.used + WORDS - old.used)
    return total


def _torch() -> Position:
    import torch

    state = torch.default_generator.get_state()
    if state.numel() < 24 + 8 * WORDS:
        return UNKNOWN
    # Layout of torch's legacy CPU state: seed (8 bytes), left (4), seeded (4), next (8), 624 words
    # of 8 bytes. Read from memory: to slice and convert the tensor would run torch operations.
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
