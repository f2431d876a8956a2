"""Sketches of tensors on a device: projected there, and put together on the host once they have
come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..recording.devices import HostCopy, Work
from .digests import BINS, ROWS, Unsuited, check_suited, flipped

BLOCK = ROWS * BINS
TOGETHER = 16 * BLOCK
"""Elements that are projected at once: three temporaries of 4 MiB."""


class LaterSketch:
    """Norm and projection of floating-point tensors on one device, as `Sketcher.sketch` gives of
    those on the CPU. Five kernels for a million elements, and one copy.

    Args:
        signs: `ROWS` times `BINS` random signs on the device.

    Attributes:
        norm, bins: once `ready` has returned True.
    """

    def __init__(self, tensors: list[Any], signs: Any) -> None:
        import torch

        self.norm, self.bins = 0.0, [0.0] * BINS
        self._copy: HostCopy | None = None
        squares, parts = [], []
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            for flat in _pieces(tensors):
                squares.append(torch.dot(flat, flat))
                whole = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK))
                parts.append((whole.view(-1, BLOCK) * signs).view(-1, ROWS, BINS).sum(1).view(-1))
                Work.add(5, 4 * 4 * flat.numel())
            if parts:
                self._squares = len(squares)
                self._copy = HostCopy(torch.cat([torch.stack(squares), *parts]))

    def ready(self, *, wait: bool = False) -> bool:
        """Whether the numbers have arrived; with `wait`, wait for them a little."""
        if self._copy is None:
            return True
        if not self._copy.arrived(wait=wait):
            return False
        numbers = self._copy.host.double()
        self.norm = math.sqrt(float(numbers[: self._squares].sum()))
        blocks = numbers[self._squares :].view(-1, BINS)
        self.bins = sum(flipped(bins, block) for block, bins in enumerate(blocks)).tolist()
        self._copy = None
        return True


def _pieces(tensors: list[Any]) -> Iterator[Any]:
    """The elements of some tensors in a row, as float32, at most `TOGETHER` at once."""
    import torch

    held: list[Any] = []
    room = TOGETHER
    for tensor in tensors:
        try:
            if tensor is None or not tensor.is_floating_point() or not tensor.is_contiguous():
                continue
            check_suited(tensor)
        except Unsuited:  # `sums` has reported it
            continue
        flat = tensor.detach().view(-1)
        while flat.numel():
            count = min(room, flat.numel())
            part = flat.narrow(0, 0, count)
            held.append(part if part.dtype is torch.float32 else part.to(torch.float32))
            flat = flat.narrow(0, count, flat.numel() - count)
            room -= count
            if not room:
                yield torch.cat(held)
                held, room = [], TOGETHER
    if held:
        yield torch.cat(held)
