"""Devices of ranks, and what DataParallel gathers on one of them."""

from __future__ import annotations

from .base import Event, Part


class DeviceUsed(Event, frozen=True, tag="device-used"):
    """A device that this rank trains on or has selected.

    Attributes:
        index: torch's device index; `uuid` identifies the device across processes.
        why: `parameters` that it trains, or `set_device`.
    """

    index: int
    uuid: str
    name: str
    site: int
    why: str = "parameters"

    def describe(self) -> str:
        return f"uses cuda:{self.index} ({self.name})"


class DeviceTouched(Event, frozen=True, tag="device-touched"):
    """A CUDA context was found on a device that this rank neither trains on nor selected.

    Attributes:
        by: when it was found: after `torch.load`, before the wrap or before a step.
    """

    index: int
    uuid: str
    site: int
    by: str


class DataParallelMade(Event, frozen=True, tag="data-parallel"):
    """`torch.nn.DataParallel` wraps a model in this process.

    Attributes:
        devices: torch's numbers of the devices it splits batches over; empty without GPUs.
        output_device: where outputs are gathered, -1 without GPUs.
    """

    model: int
    kind: str
    site: int
    devices: tuple[int, ...]
    output_device: int
    parameter_bytes: int = 0

    def describe(self) -> str:
        return f"wrapped {self.kind} in DataParallel over {len(self.devices)} devices"


class GatheredTensor(Part, frozen=True):
    """A gathered output tensor (part of `Gathered`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


class Gathered(Event, frozen=True, tag="gathered"):
    """Outputs that DataParallel gathered in one forward. Recorded when they change.

    Attributes:
        size_bytes: of all outputs on the output device.
        forward: number of forwards of the model before.
    """

    model: int
    forward: int
    step: int
    site: int
    output_device: int
    size_bytes: int
    tensors: tuple[GatheredTensor, ...] = ()


class DeviceMemory(Event, frozen=True, tag="device-memory"):
    """torch's allocator on every device of a DataParallel model, between two steps.

    Attributes:
        devices: torch's numbers; allocated and peak bytes in the same order.
    """

    step: int
    devices: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
