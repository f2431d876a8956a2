"""Digests of the content of batches and model inputs: whether ranks train on the same samples.

Some bytes of each sample are read from host memory, without torch operations. Tensors on a device,
of an unusual type or layout are skipped.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from .limits import (
    BATCH_PARTS,
    LEAVES,
    NESTED_AT_MOST,
    PADDED,
    PIECES,
    STATE_ENTRIES,
    WINDOW,
    WINDOWS,
)


def rows_of(batch: Any, size: int) -> list[int]:
    """A digest of each row of the largest plain tensor in a batch of so many samples; empty if
    there is none."""
    sizes = [(n, p) for p in leaves(batch, size) if (n := _host_bytes(p))] if size else []
    return _digest_rows(max(sizes, key=lambda s: s[0])[1], size) if sizes else []


def _host_bytes(part: Any) -> int:
    """The size of a plain tensor in host memory; 0 for anything else."""
    import torch

    plain = type(part) is torch.Tensor and part.is_cpu and part.layout is torch.strided
    return part.numel() * part.element_size() if plain else 0


def first_dimension(batch: Any) -> int | None:
    """The size of the first dimension of the first tensor in a batch; None if it has no tensor."""
    first = _first_tensor(batch)
    return None if first is None else int(first.shape[0])


def begins(batch: Any) -> int:
    """The row at which the first tensor of a batch begins within its storage: not 0 for a slice."""
    import torch

    first = _first_tensor(batch)
    if type(first) is not torch.Tensor or first.layout is not torch.strided:
        return 0
    offset, row = first.storage_offset(), first.stride(0)
    return offset // row if row and offset % row == 0 else 0


def _first_tensor(batch: Any) -> Any:
    tensors = (leaf for leaf in _walk(batch, None, 0) if getattr(leaf, "shape", None))
    return next(tensors, None)


def samples(inputs: tuple[Any, ...]) -> int:
    """How many samples a model's inputs hold: the length of a list of dictionaries, or the rows of
    the first tensor; 0 if there is no tensor."""
    first = inputs[0] if inputs else None
    if isinstance(first, (list, tuple)) and first and isinstance(first[0], Mapping):
        return len(first)
    return first_dimension(inputs) or 0


def size_of(inputs: tuple[Any, ...], without: Collection[Any] = ()) -> int:
    """How many elements all tensors and arrays in a model's inputs have; 0 if there are too many.

    Args:
        without: tensors in this `memory` do not count.
    """
    parts = list(itertools.islice(_walk(inputs, None, 0, LEAVES), LEAVES))
    kept = [p for p in parts if memory(p) not in without] if without else parts
    return sum(map(_size, kept)) if len(parts) < LEAVES else 0


def memory(leaf: Any) -> Any:
    """A key for a tensor's storage, which is not reused when that is freed; None for anything but a
    plain tensor in host memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    plain = _host_bytes(leaf) > 0
    return StorageWeakRef(leaf.untyped_storage()) if plain else None


def memories(value: Any) -> set[Any]:
    """`memory` of all tensors in a model's inputs or output."""
    return {found for leaf in _walk(value, None, 0) if (found := memory(leaf)) is not None}


def _size(leaf: Any) -> int:
    count = getattr(leaf, "numel", None)
    return int(count()) if callable(count) else int(getattr(leaf, "size", 0) or 0)


class LatestBatch:
    """The batch that a loader delivered last, as far as it was examined.

    Attributes:
        numbers: in the largest part of it.
    """

    numbers = 0

    def take(self, batch: Any) -> None:
        self.numbers = max((_size(leaf) for leaf in _walk(batch, None, 0)), default=0)


latest_batch = LatestBatch()


def leaves(batch: Any, size: int | None, without: Collection[Any] = ()) -> Iterator[Any]:
    """The first `BATCH_PARTS` tensors, arrays or lists in a batch.

    Args:
        size: only those with so many entries, one per sample; None for any.
        without: not those in this `memory`.
    """
    parts = _walk(batch, size, 0)
    if without:
        parts = (part for part in parts if memory(part) not in without)
    yield from itertools.islice(parts, BATCH_PARTS)


def _walk(value: Any, size: int | None, depth: int, widest: int = 4 * BATCH_PARTS) -> Iterator[Any]:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        if size is None or (len(shape) and shape[0] == size):
            yield value
    elif depth == NESTED_AT_MOST:
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _walk(part, size, depth + 1, widest)
    elif isinstance(value, (list, tuple)):
        if value and len(value) == size and _is_column(value, size):
            yield value
        else:
            for part in value[:widest]:
                yield from _walk(part, size, depth + 1, widest)
    elif isinstance(value, (str, bytes, int, float)):
        if size is None:
            yield [value]
    elif hasattr(value, "__dict__"):
        for part in list(vars(value).values()):
            yield from _walk(part, size, depth + 1, widest)


def _is_column(values: Any, size: int | None) -> bool:
    """Whether a list has one entry per sample; else it has the parts of a batch, and by chance as
    many as there are samples."""
    first = values[0]
    if isinstance(first, (str, bytes, int, float)):
        return True
    shape = getattr(first, "shape", None)
    if shape is not None:
        return not (len(shape) and all(getattr(v, "shape", (None,))[:1] == (size,) for v in values))
    return isinstance(first, (dict, list)) and len(first) != size


def digest(part: Any, row: int | None) -> tuple[int, int]:
    """Two digests of a sample's entry in a part of a batch (of the whole part if `row` is None): of
    its first bytes, and of pieces of all of it. 0 if it cannot be read."""
    import torch

    if type(part) in (torch.Tensor, torch.nn.Parameter):
        width = part.element_size() if part.dtype in (torch.int64, torch.int32) else 0
        address, size = _address_of(part, row)
        if not size and row is None:
            return _digest_pieces(part)
        return _digest_memory(address, size, width)
    if isinstance(part, (list, tuple)):
        entry = part[row] if row is not None and row < len(part) else part
        while isinstance(entry, (dict, list, tuple)) and entry:
            entry = next(iter(entry.values())) if isinstance(entry, dict) else entry[0]
        if type(entry) is torch.Tensor:
            return digest(entry, None)
        part, row = entry, None
    if isinstance(part, (str, bytes, int, float)):
        text = part if isinstance(part, bytes) else str(part).encode()
        return zlib.crc32(text[:WINDOW]), zlib.crc32(text[: 64 * WINDOW])
    if holds_objects(part):
        entry = part if row is None else part[row]
        return digest(entry.tolist() if holds_objects(entry) else entry, None)
    if hasattr(part, "tobytes") and hasattr(part, "dtype"):
        content = (part if row is None else part[row]).tobytes()
        return zlib.crc32(content[:WINDOW]), zlib.crc32(content[: 64 * WINDOW])
    return 0, 0


def digests_of_rows(values: Any, rows: range) -> Iterator[tuple[int, int]]:
    """`digest` of each of these rows of a tensor or array."""
    import torch

    if type(values) in (torch.Tensor, torch.nn.Parameter) and rows:
        address, size = _address_of(values, 0)
        if size and _address_of(values, rows[-1])[1]:
            width = values.element_size() if values.dtype in (torch.int64, torch.int32) else 0
            yield from (_digest_memory(address + n * size, size, width) for n in rows)
            return
    yield from (digest(values, n) for n in rows)


def holds_objects(part: Any) -> bool:
    """Whether a numpy array has dtype object: its bytes are addresses, which differ per process."""
    return bool(getattr(getattr(part, "dtype", None), "hasobject", False))


def _digest_rows(tensor: Any, count: int) -> list[int]:
    """A digest of each of the first `count` rows of a plain tensor; zeros if it cannot be read."""
    import torch

    address, size = _address_of(tensor, 0)
    padded = tensor.element_size() if tensor.dtype in (torch.int64, torch.int32) else 0
    if not size or not _address_of(tensor, count - 1)[1]:
        return [0] * count
    if padded:
        return [_digest_memory(address + n * size, size, padded)[1] for n in range(count)]
    held = memoryview((ctypes.c_char * (count * size)).from_address(address))
    short = size <= WINDOW * WINDOWS
    width = size if short else WINDOW
    windows = (0,) if short else (0, (size - WINDOW) // 2, size - WINDOW)
    found = []
    for start in range(0, count * size, size):
        value = size
        for at in windows:
            value = zlib.crc32(held[start + at : start + at + width], value)
        found.append(value)
    return found


def _address_of(tensor: Any, row: int | None) -> tuple[int, int]:
    """Address and size in bytes of a tensor, or of one row of it; (0, 0) if it cannot be read as
    one piece."""
    import torch

    count = tensor.numel()
    if not count or not tensor.is_cpu or tensor.layout is not torch.strided:
        return 0, 0
    address, width = tensor.data_ptr(), tensor.element_size()
    if row is None:
        dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last) \
            if tensor.dim() == 4 else tensor.is_contiguous()  # fmt: skip
        start, count = 0, count if dense else 0
    else:
        count //= tensor.shape[0]
        start = row * count if tensor.stride(0) == count or tensor.shape[0] == 1 else -1
    inside = (tensor.storage_offset() + start + count) * width <= tensor.untyped_storage().nbytes()
    if not address or start < 0 or not count or not inside:
        return 0, 0
    return address + start * width, count * width


def _digest_pieces(tensor: Any) -> tuple[int, int]:
    """Two digests of a tensor that is not contiguous, by the begins of contiguous pieces."""
    import torch

    if not tensor.numel() or not tensor.is_cpu or tensor.layout is not torch.strided:
        return 0, 0
    address, width = tensor.data_ptr(), tensor.element_size()
    outer = [(n, by) for n, by in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in outer)
    if not address or (last + 1) * width > tensor.untyped_storage().nbytes():
        return 0, 0
    piece = 1
    while outer and outer[-1][1] == piece:
        piece *= outer.pop()[0]
    count = math.prod(size for size, _ in outer)
    head, body = 0, tensor.numel()
    for n in dict.fromkeys(i * (count - 1) // (PIECES - 1) for i in range(PIECES)):
        start = 0
        for size, stride in reversed(outer):
            n, at = divmod(n, size)
            start += at * stride
        content = ctypes.string_at(address + start * width, min(piece * width, WINDOW))
        head, body = head or zlib.crc32(content), zlib.crc32(content, body)
    return head, body


def _digest_memory(address: int, size: int, padded: int = 0) -> tuple[int, int]:
    """Two digests of bytes in memory: of the first ones, and of pieces of all of them.

    Args:
        padded: bytes of an element; then equal elements at the end, which may be padding to the
            longest sample of the batch, do not count.
    """
    if not size:
        return 0, 0
    if padded:
        content = ctypes.string_at(address, min(size, PADDED))
        last = content[-padded:]
        end = len(content)
        while end > padded and content[end - 2 * padded : end - padded] == last:
            end -= padded
        return zlib.crc32(content[:WINDOW]), zlib.crc32(content[: end - padded] or content)
    head = zlib.crc32(ctypes.string_at(address, min(size, WINDOW)))
    if size <= WINDOW * WINDOWS:
        return head, zlib.crc32(ctypes.string_at(address, size))
    step = (size - WINDOW) // (WINDOWS - 1)
    body = size
    for n in range(WINDOWS):
        body = zlib.crc32(ctypes.string_at(address + n * step, WINDOW), body)
    return head, body


def digest_state(state: Any, *, whole: bool = True) -> int:
    """A digest of a nested state of numbers, texts and tensors.

    Args:
        whole: 0 if it is too large or holds what cannot be read; else that part is left out.
    """
    value, left, seen = 0, [state], 0
    while left:
        part, seen = left.pop(), seen + 1
        if seen > STATE_ENTRIES:
            return 0 if whole else value or 1
        if isinstance(part, Mapping):
            pairs = itertools.islice(part.items(), STATE_ENTRIES + 1)
            left += [entry for pair in pairs for entry in pair]
        elif isinstance(part, (list, tuple)):
            left += part[: STATE_ENTRIES + 1]
        elif part is None or type(part) in (bool, int, float, str, bytes):
            value = zlib.crc32(repr(part).encode(), value)
        elif any(found := digest(part, None)):
            value = zlib.crc32(repr(found).encode(), value)
        elif whole:
            return 0
    return value or 1


class Content(NamedTuple):
    """What a model is given.

    Attributes:
        digest: of its first inputs; 0 if one cannot be read.
        numbers: how many elements all inputs have.
        parts: a digest of each of the first inputs, and `sizes` their elements; empty if one cannot
            be read.
    """

    digest: int
    numbers: int
    parts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def content(inputs: tuple[Any, ...], own: Collection[Any] = ()) -> Content:
    """Digests of the inputs of a model.

    Args:
        own: inputs in this `memory` do not count: they are outputs of the model itself.
    """
    total, parts, sizes = 0, [], []
    for leaf in leaves(inputs, None, without=own):
        head, body = digest(leaf, None)
        if not body:
            return Content(0, size_of(inputs, own))
        parts.append(head + 7 * body & 0xFFFFFFFF)
        sizes.append(_size(leaf))
        total = total * 31 + head + 7 * body & 0xFFFFFFFF
    return Content(total, size_of(inputs, own), tuple(parts), tuple(sizes))
