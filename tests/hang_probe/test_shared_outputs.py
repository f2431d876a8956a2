"""Outputs of a collective that are one tensor, where the program reads them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.events import SharedOutputs
from ddpdoctor.probe.collectives.shared_outputs import OutputLists


class NoMemory:
    def data_ptr(self) -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    def numel(self) -> int:
        return 1


@pytest.fixture
def gather() -> Any:
    """Stands for the collective; `gather.seen` is what was recorded."""
    events: list[SharedOutputs] = []
    sites = SimpleNamespace(
        user_frame=lambda frame: sys._getframe(3), number=lambda code, line: line
    )
    recorder: Any = SimpleNamespace(sites=sites, site=lambda: 1, step=0, emit=events.append)
    watcher, places = OutputLists(), iter(range(9))

    def call(outputs: Any) -> None:
        watcher.look(recorder, next(places), "all_gather", outputs)

    call.seen = events  # type: ignore[attr-defined]
    return call


def test_one_tensor_that_is_read(gather: Any) -> None:
    outs = [torch.zeros(2)] * 3
    gather(outs)
    assert [(e.outputs, e.distinct) for e in gather.seen] == [(3, 1)]
    assert gather.seen[0].made_site > 0
    assert outs


def test_one_tensor_that_nothing_reads(gather: Any) -> None:
    outs = [torch.zeros(2)] * 3
    gather(outs)
    assert not gather.seen


def test_tensors_of_their_own(gather: Any) -> None:
    outs = [torch.zeros(2) for _ in range(3)]
    parts = list(torch.zeros(3, 2).unbind())
    hidden = [NoMemory()] * 2
    gather(outs)
    gather(parts)
    gather(hidden)
    assert not gather.seen and outs and parts and hidden
