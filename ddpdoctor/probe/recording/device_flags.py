"""A boolean on a CUDA device, read without waiting for the device."""

from __future__ import annotations

from typing import Any


class Flag:
    """A copy of a boolean tensor on its way from a device.

    Args:
        bad: a boolean tensor without dimensions, on a CUDA device.
    """

    def __init__(self, bad: Any) -> None:
        import torch

        self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._host.copy_(bad, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(bad.device))

    def answer(self) -> bool | None:
        """The value; None as long as the device has not computed it."""
        return bool(self._host.item()) if self._event.query() else None
