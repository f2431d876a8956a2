"""Digests: numbers of 32 bits that are equal if tensors are equal bit by bit; and sketches, which
tell how far apart two tensors are.

A digest is the wrap-around sum of the tensor's memory, read as 64-bit integers, scattered to 32
bits. Integer sums do not depend on threads or order, and any single flipped bit changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..recording.devices import Work, hands_off, readable_later
from ..recording.torch_compat import shard
from .limits import PIECE, PIECES_AT_MOST, VALUES_SAMPLED

ABSENT = 0
"""The digest of None, and of tensors that cannot be digested."""


BINS = 64
"""Numbers in a sketch: few, and yet the distance of two tensors is off by only some ten per
cent."""
FEW_BINS = 16
"""Numbers in a sketch of one tensor: off by a third, for what differs by far."""
ROWS = 1021
"""Rows of random signs, then reused: a prime, as no tensor's shape has that period."""
_SCATTER = 0x9E3779B97F4A7C15
"""Fibonacci hashing: the product with 2**64 / golden ratio spreads differences over all bits."""


class Unsuited(Exception):
    """Raised for a tensor that cannot be digested; the message says why."""


def scattered(total: int) -> int:
    """A signed 32-bit hash of a 64-bit sum; never `ABSENT`."""
    word = (total * _SCATTER & 0xFFFFFFFFFFFFFFFF) >> 32
    return (word - (1 << 32) if word >> 31 else word) or 1


ZERO = scattered(0)
"""The digest of a tensor of zeros."""


def word_sum(tensor: Any) -> Any:
    """The sum of a tensor's memory, as an int64 tensor without dimensions on the same device.

    Call it under `torch.inference_mode()`, where views cost least, and after `check_suited`.

    Raises:
        Unsuited: the tensor is empty, or its elements are of an unusual size.
    """
    import torch

    width = tensor.element_size()
    if not tensor.numel():
        raise Unsuited("it has no elements")
    if tensor.dim() and tensor.shape[-1] * width % 8 == 0:
        try:
            return tensor.view(torch.int64).sum()
        except RuntimeError:  # the last dimension is not contiguous, or not aligned to 8 bytes
            pass
    as_integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width)
    if as_integer is None and width in (8, 16):
        return _flat(tensor).view(torch.int64).sum()
    if as_integer is None:
        raise Unsuited(f"its elements have {width} bytes")
    flat = _flat(tensor)
    per_word = 8 // width
    # Eight bytes at a time, except for small tensors, where three more operations cost more.
    if flat.numel() < 4096 or flat.storage_offset() % per_word or not flat.is_contiguous():
        return _sum_of_elements(flat.view(as_integer))
    whole = flat.numel() // per_word * per_word
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        total = total + flat[whole:].view(as_integer).sum(dtype=torch.int64)
    return total


def _sum_of_elements(values: Any) -> Any:
    """The sum of small integers as 64-bit ones. torch converts all of them first, to 8 bytes each:
    it is given so many at a time that this takes no more than 8 MiB.

    Raises:
        Unsuited: that would be too many times.
    """
    import torch

    if values.numel() <= PIECE:
        return values.sum(dtype=torch.int64)
    if values.numel() > PIECE * PIECES_AT_MOST and not values.is_cpu:
        raise Unsuited("it is large, and not aligned to 8 bytes or not contiguous")
    longest = max(range(values.dim()), key=lambda dim: int(values.shape[dim]))
    many = max(1, PIECE * values.shape[longest] // values.numel())
    parts = [_sum_of_elements(part) for part in values.split(many, longest)]
    return torch.stack(parts).sum()


def _flat(tensor: Any) -> Any:
    """A one-dimensional view of a tensor's memory, in any order, as a sum needs none; the tensor
    itself if its memory has gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    dense = tensor.permute(order)
    return dense.view(-1) if dense.is_contiguous() else tensor


def check_suited(tensor: Any) -> None:
    """Raise if a tensor is no plain dense tensor that can be read, now or later.

    Raises:
        Unsuited: with the reason.
    """
    import torch

    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsuited(f"a {kind.__name__} is no plain tensor")
    if tensor.layout is not torch.strided:
        raise Unsuited(f"its layout is {tensor.layout}")
    if tensor.is_quantized or not (tensor.is_cpu or readable_later(tensor.device)):
        raise Unsuited("it is quantised" if tensor.is_quantized else f"it is on {tensor.device}")
    if tensor.is_complex() and tensor.is_conj():
        raise Unsuited("it is a conjugated view")
    if memory_freed(tensor):
        raise Unsuited("its memory was given back")  # `fully_shard` does so between uses


def memory_freed(tensor: Any) -> bool:
    """Whether a tensor's storage is smaller than the tensor: `fully_shard` frees it between uses.
    Reading it would be a segmentation fault."""
    if not hasattr(tensor, "untyped_storage"):
        return False
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # it has no storage of its own
        return True
    return held < tensor.nbytes and held < _reach(tensor)


def _reach(tensor: Any) -> int:
    """Bytes from the begin of a tensor's storage to the end of its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int((last + 1) * tensor.element_size()) if tensor.numel() else 0


def readable(tensor: Any) -> bool:
    """Whether a tensor is a plain dense one on the CPU whose memory can be read."""
    if not tensor.is_cpu:
        return False
    try:
        check_suited(tensor)
    except Unsuited:
        return False
    return True


def sums(tensors: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """`word_sum` of each tensor, None for None and for unsuited tensors; and the distinct reasons
    why tensors were unsuited. None also for those on a device that is to be left alone."""
    import torch

    untouchable: bool | None = None
    found: list[Any] = []
    reasons: dict[str, None] = {}
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor is None:
                found.append(None)
                continue
            try:
                check_suited(tensor)
                if tensor.is_cpu:
                    found.append(word_sum(tensor))
                    continue
                untouchable = hands_off() if untouchable is None else untouchable
                found.append(None if untouchable else word_sum(tensor))
                Work.add(0 if untouchable else 1, 0 if untouchable else tensor.nbytes)
            except Unsuited as error:
                reasons[str(error)] = None
                found.append(None)
    return found, list(reasons)


def numbers(totals: Sequence[Any]) -> list[int]:
    """Digests from `word_sum`s on the CPU (or plain integers); `ABSENT` for None."""
    return [ABSENT if t is None else scattered(int(t)) for t in totals]


def digests(tensors: Iterable[Any]) -> list[int]:
    """Digests of tensors on the CPU. `ABSENT` for None, for unsuited tensors, and for those on a
    device."""
    on_cpu = (t if t is not None and t.is_cpu else None for t in tensors)
    return numbers(sums(on_cpu)[0])


def writes_a_block(old: Any, new: Any) -> bool:
    """Whether two versions of a tensor differ in one block of at least two rows (or columns, or
    slices of another dimension) and agree in the rest; the block may go on at the beginning, as
    that of a ring buffer does."""
    import torch

    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        changed = old != new
        for dim, size in enumerate(changed.shape):
            others = [d for d in range(changed.dim()) if d != dim]
            slices = changed.any(others) if others else changed
            edges = int((slices != slices.roll(1)).sum())
            if edges == 2 and 2 <= int(slices.sum()) < size:
                return True
    return False


def some_values(tensors: list[Any]) -> list[float]:
    """Up to `VALUES_SAMPLED` values, evenly spread, of each contiguous floating-point tensor on the
    CPU, in one list; nothing for others."""
    import torch

    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        on_cpu = [t for t in tensors if t is not None and t.is_cpu]
        return [value for part in sampled(on_cpu) for value in part.tolist()]


def sampled(tensors: list[Any]) -> list[Any]:
    """Views of up to `VALUES_SAMPLED` elements, evenly spread, of those tensors that are contiguous
    and of floating-point numbers. Call it under `torch.inference_mode()`."""
    views = []
    for tensor in tensors:
        try:
            check_suited(tensor)
        except Unsuited:
            continue
        if tensor.is_floating_point() and tensor.is_contiguous() and tensor.numel():
            count = min(tensor.numel(), VALUES_SAMPLED)
            views.append(tensor.as_strided((count,), (tensor.numel() // count,)))
    return views


class Sketcher:
    """Projects tensors onto random signs, the same in every rank (AMS sketch).

    The signs come from a generator of its own, not from the global one.
    """

    def __init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(20250615)
        drawn = torch.randint(0, 2, (ROWS * BINS,), generator=generator, device="cpu")
        self._signs = (drawn * 2 - 1).to(torch.float32)
        self._elsewhere: dict[Any, Any] = {}

    def sketch(self, tensors: Iterable[Any]) -> tuple[float, list[float]]:
        """The norm of all tensors on the CPU taken as one vector, and its projection: `BINS`
        numbers."""
        import torch

        bins = torch.zeros(BINS, dtype=torch.float64)
        square, block = 0.0, 0
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                if tensor is None or not tensor.is_floating_point() or not tensor.numel():
                    continue
                try:
                    check_suited(tensor)
                except Unsuited:  # `sums` has reported it
                    continue
                flat = _flat(tensor).reshape(-1).to(torch.float32)
                square += float(torch.dot(flat, flat))
                for begin in range(0, flat.numel(), ROWS * BINS):
                    bins += self._project(flat[begin : begin + ROWS * BINS], block)
                    block += 1
        return square**0.5, bins.tolist()

    def bins(self, tensor: Any) -> Any:
        """The projection of one floating-point tensor onto `FEW_BINS` numbers, on its own device;
        None if it cannot be read."""
        import torch

        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            try:
                check_suited(tensor)
            except Unsuited:
                return None
            flat = _flat(tensor).reshape(-1)
            size = ROWS * BINS
            parts = [
                self._project(flat[n * size : (n + 1) * size], n)
                for n in range(-(-flat.numel() // size))
            ]
            return torch.stack(parts).sum(0).view(-1, FEW_BINS).sum(0)

    def signs_on(self, device: Any) -> Any:
        """The signs on a device; copied there once, from pinned memory, which waits for nothing."""
        if device.type == "cpu":
            return self._signs
        if device not in self._elsewhere:
            self._elsewhere[device] = self._signs.pin_memory().to(device, non_blocking=True)
        return self._elsewhere[device]

    def _project(self, flat: Any, block: int) -> Any:
        import torch

        signed = flat.to(torch.float32) * self.signs_on(flat.device)[: flat.numel()]
        if flat.numel() % BINS:
            signed = torch.nn.functional.pad(signed, (0, -flat.numel() % BINS))
        sums = signed.view(-1, BINS).sum(0, dtype=torch.float64)
        return flipped(sums, block)


def flipped(bins: Any, block: int) -> Any:
    """The projection of a block, rotated and flipped: all blocks share their signs, and equal
    changes would add up."""
    sign = 1 if block * 0x9E3779B1 >> 7 & 1 else -1
    return bins.roll(block * 29 % BINS) * sign


def finite(tensor: Any) -> bool:
    """Whether all elements of a tensor (of this rank's shard, for a DTensor) are finite. True for
    what is no floating-point or complex tensor on the CPU, or cannot be read."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        return True
    with torch._C.DisableTorchFunctionSubclass():
        plain = shard(tensor).detach()
        floating = plain.is_floating_point()
        if not (floating or plain.is_complex()) or not readable(plain) or not plain.numel():
            return True
        if floating and plain.numel() == 1:
            return math.isfinite(plain.item())
        # A sum takes half the time of `isfinite`; if it overflows, the elements decide.
        if floating and math.isfinite(plain.sum().item()):
            return True
        return bool(torch.isfinite(plain).all().item())
