"""Devices: what the probe needs of CUDA, XPU and other accelerators, in one place.

Values are copied to the host behind the work that computes them and read once they are there.
Nothing here waits for a device without a limit: where a rank hangs, so does its device. Nothing is
asked of one while a CUDA graph is captured, by whatever thread: that would invalidate the capture;
nor once a device has reported an error.

What is not read on a device is named in `UNREAD`, check by check.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from .stopwatch import loading_while_busy

PATIENCE_S = 0.5
"""Seconds that may be waited for a device at the end, in all; then nothing is waited for again."""

_POLL_S = 0.005

LAUNCH_NS, BYTES_PER_NS = 3_000.0, 1000.0
"""Estimates of a device's time: for a kernel, and of its memory's speed (1 TB/s)."""

HOST_LAUNCH_NS = 25_000
"""Nanoseconds of the host that a digest on a device costs at most. What it takes beyond is waiting
for a place in the queue of a device that is behind, as the program's own launches do."""

ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "mtia", "musa", "mlu")
"""Kinds of devices, as torch's modules of them are called; ROCm's is `cuda`."""

_COUNTERS = (
    ("allocated_bytes", "current"), ("allocated_bytes", "peak"), ("reserved_bytes", "current"),
)  # fmt: skip

_ERRORS = ("CUDA error", "HIP error", "cuBLAS error", "CUBLAS_STATUS", "XPU error")

UNREAD: dict[str, str] = {
    "zero-gradient": "gradients on a device are not read",
}
"""Checks that have nothing to go by where parameters are on a device, and why."""

UNREAD_PARTLY: dict[str, str] = {
    "double-averaging": "gradients of wrapped models on a device that the program divides",
    "clip-before-sync": "gradients on a device that the program itself scales",
    "hyperparameter-skew": "options that are tensors on a device",
    "grad-scaler-skew": "loss scales, which are on the device",
    "gradient-drift": "the line that changed gradients on a device, the distance in large models",
    "parameter-drift": "the line that changed parameters on a device, the distance in large models",
    "nonfinite-origin": "on a device, which operation and which parameters",
}
"""What checks leave out there."""

WITHOUT_EVENTS = (
    "gradient-drift", "parameter-drift", "buffer-drift", "optimizer-state-drift",
    "zero-grad-missing", "nonfinite-origin",
)  # fmt: skip
"""Checks that have nothing to go by on devices that are not `readable_later`."""


class Captures:
    """CUDA graphs that are being captured, by any thread of the process: see `CudaGraphs`."""

    running = 0


class _Patience:
    """What is left of the seconds that may be waited for devices."""

    left_s = PATIENCE_S


class Failed:
    """A device has reported an error: see `failed`."""

    seen = False


class Work:
    """What the doctor gave devices to do so far, estimated: launching takes about `LAUNCH_NS` of a
    device, and it reads `BYTES_PER_NS`.

    Attributes:
        latest: the last answer that was asked for in a step, behind the work of its backward.
    """

    ns = 0.0
    latest: HostCopy | None = None

    @classmethod
    def add(cls, launches: int, size_bytes: int = 0) -> None:
        cls.ns += launches * LAUNCH_NS + size_bytes / BYTES_PER_NS


def hands_off() -> bool:
    """Whether devices are to be left alone now: a CUDA graph is being captured, or one of them has
    reported an error. Initialises no driver."""
    if Captures.running or Failed.seen:
        return True
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def failed(error: BaseException) -> bool:
    """Whether an error is that of a device; nothing is launched on any from then on. A launch of
    the doctor's raises what an earlier kernel of the program's did, and clears it."""
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", None)
    of_device = kind is not None and isinstance(error, kind)
    if of_device or any(text in str(error)[:200] for text in _ERRORS):
        Failed.seen = True
        return True
    return False


def initialized() -> list[Any]:
    """torch's modules (`torch.cuda`, `torch.xpu`) of the kinds of devices that are in use."""
    torch = sys.modules["torch"]
    known = (getattr(torch, name, None) for name in ACCELERATORS)
    return [module for module in known if module is not None and _in_use(module)]


def _in_use(module: Any) -> bool:
    try:
        return bool(module.is_initialized())
    except (AttributeError, RuntimeError):
        return False


def memory() -> tuple[int, int, int]:
    """Allocated, peak and reserved bytes of this process on all its devices together, by torch's
    allocators, which count on the host."""
    totals = [0, 0, 0]
    for module in initialized():
        if not hasattr(module, "memory_stats_as_nested_dict"):
            continue
        for index in range(module.device_count()):
            stats = module.memory_stats_as_nested_dict(index)
            for n, (name, when) in enumerate(_COUNTERS):
                totals[n] += int(stats.get(name, {}).get("all", {}).get(when, 0))
    return totals[0], totals[1], totals[2]


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
        Work.add(1, self.host.nbytes)

    def arrived(self, *, wait: bool = False) -> bool:
        """Whether the copy is there.

        Args:
            wait: for at most what is left of `PATIENCE_S`.
        """
        if hands_off():
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

    if values.is_cpu or hands_off() or not readable_later(values.device):
        return None
    largest = torch.linalg.vector_norm(values.detach(), ord=float("inf"))
    Work.add(1, values.nbytes)
    return HostCopy(largest.reshape(()))


class Flags:
    """Which of several numbers on devices are NaN or infinite, answered once they have been
    computed: one kernel for all of them, one copy and one event.

    Args:
        numbers: floating-point tensors without dimensions.
    """

    def __init__(self, numbers: list[Any]) -> None:
        import torch

        if len(numbers) == 1:
            self._copy = Work.latest = HostCopy(numbers[0].reshape(1))
            return
        device, kinds = numbers[0].device, {number.dtype for number in numbers}
        if len(kinds) > 1:  # what is finite in the wider one may not be so in the other
            wide = torch.float64 if torch.float64 in kinds else torch.float32
            numbers = [number.to(wide) for number in numbers]
        numbers = [n.to(device, non_blocking=True) for n in numbers]
        self._copy = Work.latest = HostCopy(torch.stack(numbers))
        Work.add(1)

    def answers(self, *, wait: bool = False) -> list[bool] | None:
        """For each number, whether it is not finite; None as long as that is not known."""
        if not self._copy.arrived(wait=wait):
            return None
        return [not math.isfinite(value) for value in self._copy.host.tolist()]


def overlapped(recorder: Any, waited_ns: int) -> None:
    """Note for how long a batch was waited for, where the device has not even done the backward of
    the last step: it was not idle meanwhile."""
    if Work.latest is not None and not Work.latest.arrived():
        loading_while_busy.ns += waited_ns
