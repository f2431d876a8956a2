"""While a CUDA graph is captured nothing is asked of its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.devices import Captures, hands_off
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.probe.training.cuda_graphs import CudaGraphs
from ddpdoctor.storage.run_folder import EventWriter


class Graph:
    """Stands for `torch.cuda.CUDAGraph` on a machine without CUDA."""

    fails = False
    seen: list[bool] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(hands_off())
        if self.fails:
            raise RuntimeError("no capture")

    def capture_end(self) -> None:
        self.seen.append(hands_off())

    def replay(self) -> None:
        pass


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    mine = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    monkeypatch.setattr(current, "recorder", mine)
    Graph.seen = []
    CudaGraphs.begin()
    yield Graph()
    patching.restore()
    Captures.running = 0


def test_from_the_begin_of_a_capture_to_its_end(graph: Graph) -> None:
    graph.capture_begin(capture_error_mode="global")
    assert hands_off()
    graph.capture_end()
    assert graph.seen == [True, True]
    assert not hands_off()


def test_a_capture_that_fails_is_over(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "fails", True)
    with pytest.raises(RuntimeError, match="no capture"):
        graph.capture_begin()
    assert not hands_off()


def test_replays_are_progress_and_said_to_be_unseen(graph: Graph, tmp_path: Path) -> None:
    for _ in range(3):
        graph.replay()
    assert CudaGraphs.current.replays == 3
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    (told,) = [line for line in lines if line["event"] == "not-observed"]
    assert told["check"] == "steps"
