"""CUDA graphs: while one is captured nothing is asked of the device, and what is replayed is only
seen as a replay."""

from __future__ import annotations

import time
from typing import Any

from ..collectives.call_log import call_log_of
from ..recording.devices import Captures
from ..recording.recorder import Recorder
from ..recording.watcher import Args, Error, Kwargs, Watcher


class CudaGraphs(Watcher):
    """
    Attributes:
        replays: of all graphs.
    """

    lost = "whether CUDA graphs are captured"

    def __init__(self) -> None:
        self.replays = 0
        Captures.running = 0

    def install(self) -> None:
        import torch

        graph = torch.cuda.CUDAGraph
        self.around(graph, "capture_begin", before=self._begins, after=self._began)
        self.around(graph, "capture_end", after=self._ended)
        self.around(graph, "replay", after=self._replayed)

    def _begins(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
        Captures.running += 1

    def _began(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        if error is not None:
            self._ended(recorder, before, result, error)

    def _ended(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        Captures.running = max(0, Captures.running - 1)

    def _replayed(self, recorder: Recorder, before: Any, result: Any, error: Error) -> None:
        """The rank makes progress, though it calls nothing that is seen."""
        self.replays += 1
        if log := recorder.call_log or call_log_of(recorder):
            log.ring.moved(time.monotonic())
        if self.replays == 1:
            recorder.not_observed("steps", "they are replayed from a CUDA graph")
