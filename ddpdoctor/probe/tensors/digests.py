"""Numbers that are equal where tensors are, bit for bit, and sketches of how far apart they are.

The digest is the wrap-around sum of the tensor's memory, read as integers, and scattered to 32
bits. Integer sums do not depend on threads or order; any single flipped bit changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..recording.torch_compat import shard

ABSENT = 0
"""Stands for "no tensor", or one that cannot be digested."""

SAMPLED = 4
"""Values per tensor that tell by what it was multiplied."""

BINS = 64
ROWS = 1021
_SCATTER = 0x9E3779B97F4A7C15


class Unsuited(Exception):
    """A tensor that cannot be digested; the message says why."""


def scattered(total: int) -> int:
    """32 bits, signed, of a 64-bit sum; never `ABSENT`."""
    word = (total * _SCATTER & 0xFFFFFFFFFFFFFFFF) >> 32
    return (word - (1 << 32) if word >> 31 else word) or 1


ZERO = scattered(0)
"""Of a tensor of zeros."""


def word_sum(tensor: Any) -> Any:
    """The sum of a tensor's memory as a tensor of one integer on the same device.

    Call it under `torch.inference_mode()`: the views that it takes are then the cheapest.

    Raises:
        Unsuited: sparse, quantised or distributed tensors, tensors without memory.
    """
    import torch

    width = tensor.element_size()
    if not tensor.numel():
        raise Unsuited("it has no elements")
    if tensor.dim() and tensor.shape[-1] * width % 8 == 0:
        try:
            return tensor.view(torch.int64).sum()
        except RuntimeError:  # not contiguous, or not aligned
            pass
    as_integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width)
    if as_integer is None and width in (8, 16):
        return _flat(tensor).view(torch.int64).sum()
    if as_integer is None:
        raise Unsuited(f"its elements have {width} bytes")
    flat = _flat(tensor)
    per_word = 8 // width
    if flat.numel() < 4096 or flat.storage_offset() % per_word or not flat.is_contiguous():
        return flat.view(as_integer).sum(dtype=torch.int64)
    whole = flat.numel() // per_word * per_word
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        total = total + flat[whole:].view(as_integer).sum(dtype=torch.int64)
    return total


def _flat(tensor: Any) -> Any:
    """One dimension over the same memory: the order does not matter to a sum."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    dense = tensor.permute(order)
    return dense.view(-1) if dense.is_contiguous() else tensor


def check_suited(tensor: Any) -> None:
    """Say why a tensor is no ordinary one.

    Raises:
        Unsuited
    """
    import torch

    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsuited(f"a {kind.__name__} is no plain tensor")
    if tensor.layout is not torch.strided:
        raise Unsuited(f"its layout is {tensor.layout}")
    if tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        raise Unsuited("it is quantised" if tensor.is_quantized else f"it is on {tensor.device}")
    if tensor.is_complex() and tensor.is_conj():
        raise Unsuited("it is a conjugated view")
    if memory_freed(tensor):
        raise Unsuited("its memory was given back")


def memory_freed(tensor: Any) -> bool:
    """Whether a tensor's memory is gone, as `fully_shard` frees it between its uses."""
    if not hasattr(tensor, "untyped_storage"):
        return False
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # none of its own
        return True
    return held < tensor.nbytes and held < _reach(tensor)


def _reach(tensor: Any) -> int:
    """Bytes from the begin of its storage to the end of its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int((last + 1) * tensor.element_size()) if tensor.numel() else 0


def readable(tensor: Any) -> bool:
    """Whether it is a plain tensor on the CPU whose memory can be read."""
    if not tensor.is_cpu:
        return False
    try:
        check_suited(tensor)
    except Unsuited:
        return False
    return True


def sums(tensors: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """`word_sum` of each tensor, None for None and for unsuited ones; and why those are."""
    import torch

    found: list[Any] = []
    reasons: dict[str, None] = {}
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor is None:
                found.append(None)
                continue
            try:
                check_suited(tensor)
                found.append(word_sum(tensor))
            except Unsuited as error:
                reasons[str(error)] = None
                found.append(None)
    return found, list(reasons)


def capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing may be read meanwhile."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def numbers(totals: Sequence[Any]) -> list[int]:
    """Digests from sums whose values are on this machine's side (no device is waited for)."""
    return [ABSENT if t is None else scattered(int(t)) for t in totals]


def digests(tensors: Iterable[Any]) -> list[int]:
    """Digests of tensors on the CPU, at once. `ABSENT` for None, unsuited and CUDA tensors."""
    on_cpu = (t if t is not None and t.is_cpu else None for t in tensors)
    return numbers(sums(on_cpu)[0])


def some_values(tensors: list[Any]) -> list[float]:
    """A few values of each floating tensor on the CPU."""
    import torch

    values: list[float] = []
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor is None or not readable(tensor) or not tensor.is_floating_point():
                continue
            if tensor.is_contiguous() and tensor.numel():
                count = min(tensor.numel(), SAMPLED)
                values += tensor.as_strided((count,), (tensor.numel() // count,)).tolist()
    return values


class Sketcher:
    """Projects tensors onto the same random signs in every rank. Draws from no generator but its
    own."""

    def __init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(20250615)
        drawn = torch.randint(0, 2, (ROWS * BINS,), generator=generator, device="cpu")
        self._signs = (drawn * 2 - 1).to(torch.float32)

    def sketch(self, tensors: Iterable[Any]) -> tuple[float, list[float]]:
        """The norm of all tensors on the CPU together, and their projection."""
        import torch

        bins = torch.zeros(BINS, dtype=torch.float64)
        square, block = 0.0, 0
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                if tensor is None or not tensor.is_floating_point() or not tensor.numel():
                    continue
                try:
                    check_suited(tensor)
                except Unsuited:  # `sums` has said so
                    continue
                flat = _flat(tensor).reshape(-1).to(torch.float32)
                square += float(torch.dot(flat, flat))
                for begin in range(0, flat.numel(), ROWS * BINS):
                    bins += self._project(flat[begin : begin + ROWS * BINS], block)
                    block += 1
        return square**0.5, bins.tolist()

    def _project(self, flat: Any, block: int) -> Any:
        import torch

        signed = flat * self._signs[: flat.numel()]
        if flat.numel() % BINS:
            signed = torch.nn.functional.pad(signed, (0, -flat.numel() % BINS))
        sums = signed.view(-1, BINS).sum(0, dtype=torch.float64)
        # The blocks share their signs: turn each by its own angle, or equal changes would add up.
        sign = 1 if block * 0x9E3779B1 >> 7 & 1 else -1
        return sums.roll(block * 29 % BINS) * sign


def finite(tensor: Any) -> bool:
    """Whether all of a tensor is finite, or of this rank's shard of it; true for what is no
    floating-point tensor on the CPU, or cannot be read."""
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
        # A sum is half the work; one that overflows is looked at again.
        if floating and math.isfinite(plain.sum().item()):
            return True
        return bool(torch.isfinite(plain).all().item())
