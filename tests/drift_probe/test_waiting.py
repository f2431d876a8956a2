"""Digests on their way from devices that this machine need not have."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ddpdoctor.probe.recording import devices
from ddpdoctor.probe.recording.devices import Captures, Flags
from ddpdoctor.probe.tensors.digests import ABSENT, numbers
from ddpdoctor.probe.tensors.pending_digests import Waiting


class Event:
    """Ready once the stream of the right device is waited for; counts how often it was asked."""

    asked = 0

    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream

    def query(self) -> bool:
        Event.asked += 1
        return self.stream == "of cuda:1"

    def synchronize(self) -> None:
        raise AssertionError("waits without a limit")


class OnDevice:
    """A sum, or a number."""

    is_cpu = False
    shape = ()
    dtype = torch.int64

    def __init__(self, value: float, device: str) -> None:
        self.value, self.device = value, torch.device(device)

    def to(self, device: torch.device, non_blocking: bool) -> Copied:
        return Copied(self.value, device)


class Copied:
    """A tensor on a device that this machine lacks."""

    def __init__(self, value: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        self.tensor, self.device = torch.as_tensor(value, dtype=dtype), device
        self.shape, self.dtype = self.tensor.shape, dtype

    def to(self, *args: Any, non_blocking: bool) -> Copied:
        return self

    def reshape(self, *shape: int) -> Copied:
        return Copied(self.tensor.reshape(*shape), self.device, self.dtype)


@pytest.fixture(autouse=True)
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, copy = torch.empty, torch.Tensor.copy_
    stack = torch.stack
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, device, **k: plain(*a, **k))
    monkeypatch.setattr(
        torch, "stack",
        lambda many: Copied(
            stack([one.tensor for one in many]), many[0].device, many[0].tensor.dtype
        ),
    )  # fmt: skip
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other, **k: copy(self, getattr(other, "tensor", other))
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(devices._Patience, "left_s", 0.05)
    monkeypatch.setattr(Captures, "running", 0)


def test_the_device_that_holds_them_is_waited_for() -> None:
    waiting = Waiting([None, OnDevice(7, "cuda:1"), OnDevice(9, "cuda:0")])
    assert waiting.ready()
    assert waiting.values == [ABSENT, *numbers([7, 9])]
    assert not Waiting([OnDevice(7, "cuda:0")]).ready()


def numbers_on(device: str, *values: float) -> list[Copied]:
    return [Copied(value, torch.device(device), torch.float32) for value in values]


def test_so_is_that_of_numbers() -> None:
    flags = Flags(numbers_on("cuda:1", 1.0, float("nan"), float("-inf")))
    assert flags.answers() == [False, True, True]
    assert Flags(numbers_on("cuda:1", float("nan"))).answers() == [True]
    assert Flags(numbers_on("cuda:0", 1.0)).answers() is None


def test_nothing_is_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event query would invalidate the capture, whichever thread makes it."""
    waiting, flags = Waiting([OnDevice(7, "cuda:1")]), Flags(numbers_on("cuda:1", 1.0))
    monkeypatch.setattr(Captures, "running", 1)
    monkeypatch.setattr(Event, "asked", 0)
    assert not waiting.ready(wait=True)
    assert flags.answers() is None
    assert Event.asked == 0
    monkeypatch.setattr(Captures, "running", 0)
    assert waiting.ready()


def test_a_device_that_hangs_is_waited_for_a_little_and_then_no_more() -> None:
    began = time.monotonic()
    for _ in range(20):
        assert not Waiting([OnDevice(7, "cuda:0")]).ready(wait=True)
    assert time.monotonic() - began < 1.0
    assert devices.out_of_patience()


def test_devices_without_events_are_not_read() -> None:
    readable = devices.readable_later
    assert readable(torch.device("cpu")) and readable(torch.device("cuda:0"))
    assert not readable(torch.device("meta"))
