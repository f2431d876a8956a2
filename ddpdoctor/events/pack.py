"""Long lists of integers as short text: little-endian, deflated, base64."""

from __future__ import annotations

import base64
import itertools
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

LONGEST = 64 * 1024 * 1024

SPREAD = 16
"""If there is more than one number per this many possible ones, counting is faster than sorting."""


def pack(numbers: Iterable[int]) -> str:
    """Text for `unpack`, order kept. Numbers must fit 32 bits, signed."""
    values = array("i", numbers)
    return base64.b64encode(zlib.compress(_little(values), 1)).decode() if values else ""


def unpack(text: str) -> list[int]:
    """The numbers.

    Raises:
        ValueError: the text was not made by `pack`.
    """
    return list(_inflated("i", text)) if text else []


def pack_ascending(values: array[int]) -> str:
    """Text for `unpack_ascending`: the numbers sorted, repeats kept. Up to 64 bits, signed."""
    if not values:
        return ""
    first, gaps = _gaps(values)
    # Huffman coding alone: the gaps repeat in no pattern that would be worth looking for.
    deflate = zlib.compressobj(1, zlib.DEFLATED, 15, 8, zlib.Z_HUFFMAN_ONLY)
    content = deflate.compress(_little(gaps)) + deflate.flush()
    return f"{first}:{gaps.typecode}:{base64.b64encode(content).decode()}"


def unpack_ascending(text: str) -> np.ndarray:
    """The numbers, int64.

    Raises:
        ValueError: the text was not made by `pack_ascending`.
    """
    import numpy as np

    if not text:
        return np.empty(0, "q")
    first, _, rest = text.partition(":")
    code, _, content = rest.partition(":")
    if code not in ("B", "H", "I", "Q"):
        raise ValueError("not a packed list of integers")
    gaps = np.frombuffer(_inflated(code, content), code).astype("q")
    return np.concatenate([np.array([int(first)]), gaps]).cumsum()


def _gaps(values: array[int]) -> tuple[int, array[int]]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        ordered = sorted(values)
        differences = [b - a for a, b in itertools.pairwise(ordered)]
        return ordered[0], array(_width(max(differences, default=0)), differences)
    found = numpy.frombuffer(values, dtype=numpy.int64)
    low, high = int(found.min()), int(found.max())
    if high - low < SPREAD * len(found):
        counts = numpy.bincount(found - low)
        ordered = numpy.flatnonzero(counts)
        if len(ordered) < len(found):
            ordered = numpy.repeat(ordered, counts[ordered])
    else:
        ordered = numpy.sort(found)
    steps = numpy.diff(ordered)
    code = _width(int(steps.max()) if len(steps) else 0)
    return low, array(code, steps.astype(code).tobytes())


def _width(largest: int) -> str:
    return next(code for code, limit in _WIDTHS if largest < limit)


_WIDTHS = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32), ("Q", 1 << 64))


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _inflated(code: str, text: str) -> array[int]:
    inflate = zlib.decompressobj()
    values = array(code)
    try:
        values.frombytes(inflate.decompress(base64.b64decode(text, validate=True), LONGEST))
    except (zlib.error, ValueError) as error:
        raise ValueError("not a packed list of integers") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values
