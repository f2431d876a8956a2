"""Digests on their way from devices that this machine need not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpdoctor.probe.recording.device_flags import Flag
from ddpdoctor.probe.tensors.digests import ABSENT, numbers
from ddpdoctor.probe.tensors.pending_digests import Waiting


class Event:
    """Ready once the stream of the right device is waited for."""

    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream == "of cuda:1"


class OnDevice:
    """A sum, or a flag."""

    is_cpu = False

    def __init__(self, value: int, device: str) -> None:
        self.value, self.device = value, device

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        return torch.tensor(self.value)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: plain(*a, **k))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")


def test_the_device_that_holds_them_is_waited_for() -> None:
    waiting = Waiting([None, OnDevice(7, "cuda:1"), OnDevice(9, "cuda:0")])
    assert waiting.ready()
    assert waiting.values == [ABSENT, *numbers([7, 9])]
    assert not Waiting([OnDevice(7, "cuda:0")]).ready()


def test_so_is_that_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = torch.tensor(True)
    monkeypatch.setattr(torch.Tensor, "device", "cuda:1", raising=False)
    assert Flag(bad).answer() is True
