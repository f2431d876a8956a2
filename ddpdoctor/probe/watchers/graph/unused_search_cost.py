"""How long does DDP's search for unused parameters take after each forward?

The search is wrapped only once a model sets `find_unused_parameters`.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import SearchCost
from ...recording import hooks
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...training import lifecycle
from ...training.tracked_model import Model
from ...training.wrapped_models import WrappedModels


class UnusedSearchCost(Watcher):
    lost = "the cost of find_unused_parameters"

    def __init__(self) -> None:
        self.hooked = False
        self.seconds: dict[Model, tuple[int, float]] = {}

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        if model.find_unused and not self.hooked:
            self.hooked = True
            from torch.nn.parallel.distributed import DistributedDataParallel

            # `_post_forward` walks the outputs and the graph; anything else in it takes no time.
            self.around(
                DistributedDataParallel,
                "_post_forward",
                before=_begins,
                after=self._ends,
                lost=self.lost,
                traced=True,
            )

    def _ends(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        if token is None or error is not None:
            return
        model, began = token
        searches, seconds = self.seconds.get(model, (0, 0.0))
        if model.pending_sync:
            searches, seconds = searches + 1, seconds + time.perf_counter() - began
            self.seconds[model] = searches, seconds
            if searches & (searches - 1) == 0:
                self._emit(recorder, model)

    def _emit(self, recorder: Recorder, model: Model) -> None:
        searches, seconds = self.seconds[model]
        recorder.emit(
            SearchCost(at=time.monotonic(), model=model.number, searches=searches, seconds=seconds)
        )

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for model in list(self.seconds):
            self._emit(recorder, model)


def _begins(recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
    import torch

    model = WrappedModels.current.of_wrapper(args[0])
    if model is None or not model.find_unused or not torch.is_grad_enabled():
        return None
    return model, time.perf_counter()
