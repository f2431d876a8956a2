"""How long does DDP's search for unused parameters take after each forward?

The search is wrapped only once a model sets `find_unused_parameters`.
"""

from __future__ import annotations

import time
from typing import Any

from ....events import SearchCost
from ...recording import hooks
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...training import lifecycle, wrapped_models
from ...training.tracked_model import Model

LOST = "the cost of find_unused_parameters"


class _Searches:
    hooked = False
    seconds: dict[Model, tuple[int, float]] = {}


def install() -> None:
    _Searches.hooked = False
    _Searches.seconds.clear()
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    hooks.leaving.subscribe(_leaving, lost=LOST)


def _wrapped(recorder: Recorder, model: Model) -> None:
    if model.find_unused and not _Searches.hooked:
        _Searches.hooked = True
        from torch.nn.parallel.distributed import DistributedDataParallel

        # `_post_forward` walks the outputs and the graph; anything else in it takes no time.
        around(
            DistributedDataParallel,
            "_post_forward",
            before=_begins,
            after=_ends,
            lost=LOST,
            traced=True,
        )


def _begins(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    model = wrapped_models.of_wrapper(args[0])
    if model is None or not model.find_unused or not torch.is_grad_enabled():
        return None
    return model, time.perf_counter()


def _ends(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    if token is None or error is not None:
        return
    model, began = token
    searches, seconds = _Searches.seconds.get(model, (0, 0.0))
    if model.pending_sync:
        searches, seconds = searches + 1, seconds + time.perf_counter() - began
        _Searches.seconds[model] = searches, seconds
        if searches & (searches - 1) == 0:
            _emit(recorder, model)


def _emit(recorder: Recorder, model: Model) -> None:
    searches, seconds = _Searches.seconds[model]
    recorder.emit(
        SearchCost(at=time.monotonic(), model=model.number, searches=searches, seconds=seconds)
    )


def _leaving(recorder: Recorder, _: None) -> None:
    for model in list(_Searches.seconds):
        _emit(recorder, model)
