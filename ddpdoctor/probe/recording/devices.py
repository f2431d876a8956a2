"""Devices: what the probe needs of CUDA, XPU and other accelerators, in one place.

Values are copied to the host behind the work that computes them and read once they are there.
Nothing here waits for a device without a limit: where a rank hangs, so does its device. Nothing is
asked of one while a CUDA graph is captured, by whatever thread: that would invalidate the capture.
"""

from __future__ import annotations

import sys
import time
from typing import Any

PATIENCE_S = 0.5
"""Seconds that may be waited for a device at the end, in all; then nothing is waited for again."""

_POLL_S = 0.005


class Captures:
    """CUDA graphs that are being captured, by any thread of the process: see `CudaGraphs`."""

    running = 0


class _Patience:
    """What is left of the seconds that may be waited for devices."""

    left_s = PATIENCE_S


def capturing() -> bool:
    """Whether a CUDA graph is being captured. Initialises no driver."""
    if Captures.running:
        return True
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def readable_later(device: Any) -> bool:
    """Whether values on a device can be copied without waiting for it: it has streams and events,
    as CUDA (ROCm too), XPU and others have. The host counts as such."""
    return bool(device.type in ("cpu", "cuda") or _events_of(device) is not None)


def _events_of(device: Any) -> Any:
    """torch's module of a kind of device, where that has streams and events."""
    torch = sys.modules["torch"]
    if device.type in ("meta", "cpu"):
        return None
    module = getattr(torch, device.type, None)
    known = all(hasattr(module, name) for name in ("Event", "current_stream"))
    return module if known else None


def out_of_patience() -> bool:
    """Whether a device was waited for in vain: it hangs, so nothing more is launched on it."""
    return _Patience.left_s <= 0


class HostCopy:
    """A copy of a tensor on the host, as soon as its device has computed it.

    Args:
        values: a tensor on a device that is `readable_later`, not the host.

    Attributes:
        host: the copy; its content is undefined until `arrived` has returned True.
    """

    def __init__(self, values: Any) -> None:
        import torch

        module = _events_of(values.device)
        # By default tensors may be made on a device, where none can be pinned.
        self.host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self.host.copy_(values, non_blocking=True)
        self._event = module.Event()
        self._event.record(module.current_stream(values.device))

    def arrived(self, *, wait: bool = False) -> bool:
        """Whether the copy is there.

        Args:
            wait: for at most what is left of `PATIENCE_S`.
        """
        if capturing():
            return False
        if not wait or self._event.query():
            return bool(self._event.query())
        began = time.monotonic()
        while time.monotonic() - began < _Patience.left_s:
            time.sleep(_POLL_S)
            if self._event.query():
                _Patience.left_s -= time.monotonic() - began
                return True
        _Patience.left_s = 0.0
        return False


def largest_later(values: Any) -> HostCopy | None:
    """The largest absolute value of a floating-point tensor on a device, by one kernel and a copy;
    None where it cannot be read later, or not now."""
    import torch

    if values.is_cpu or capturing() or not readable_later(values.device):
        return None
    largest = torch.linalg.vector_norm(values.detach(), ord=float("inf"))
    return HostCopy(largest.reshape(()))


class Flag:
    """Whether a number on a device is NaN or infinite, answered once the device has computed it.

    Args:
        number: a floating-point tensor of one element.
    """

    def __init__(self, number: Any) -> None:
        self._copy = HostCopy(number)

    def answer(self, *, wait: bool = False) -> bool | None:
        """True if it is not finite; None as long as that is not known."""
        if not self._copy.arrived(wait=wait):
            return None
        value = float(self._copy.host)
        return value != value or value in (float("inf"), float("-inf"))
