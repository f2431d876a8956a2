"""When are weights, optimizer and scheduler states loaded or saved, and at which line?

DDP makes weights equal at the wrap; what is loaded afterwards, or into an optimizer, only the
program can make equal. After each load the whole model is digested at the next step.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any

from ....events import Loaded, StateTaken
from ...recording.patching import around
from ...recording.recorder import Recorder
from ...training import lifecycle, wrapped_models
from ...training.tracked_model import Model
from . import replica_digests

LOST = "loads of weights and optimizer states"

EMITTED_AT_MOST = 1000
EARLY_AT_MOST = 50
"""Loads recorded, and loads remembered that came before any model was wrapped."""


class _Loads:
    """
    Attributes:
        depth, saving: nesting of `load_state_dict` and `state_dict` calls; modules call those of
            their children.
        emitted: loads recorded.
        taken: calls of `state_dict`, by line.
        early: loads into an optimizer before its model was wrapped: what, optimizer, time and line.
            The wrap makes weights equal but not these.
    """

    depth = 0
    emitted = 0
    saving = 0
    taken: Counter[int] = Counter()
    early: list[tuple[str, weakref.ref[Any], float, int]] = []


_loads = _Loads()


def install() -> None:
    import torch.amp
    import torch.nn
    from torch.optim import Optimizer, lr_scheduler

    _loads.depth = _loads.emitted = _loads.saving = 0
    _loads.taken = Counter()
    _loads.early = []
    around(torch.nn.Module, "load_state_dict", before=_load_module, after=_load_ends, lost=LOST)
    around(
        torch.nn.Module,
        "state_dict",
        before=_state_dict_begins,
        after=_state_dict_ends,
        lost="checkpoints",
    )
    around(Optimizer, "load_state_dict", before=_load_optimizer, after=_load_ends, lost=LOST)
    scaler = torch.amp.GradScaler
    around(scaler, "load_state_dict", before=_load_scaler, after=_load_ends, lost=LOST)
    for kind in vars(lr_scheduler).values():
        own = isinstance(kind, type) and kind is not Optimizer  # `lr_scheduler` imports it
        if own and "load_state_dict" in vars(kind):
            around(kind, "load_state_dict", before=_load_scheduler, after=_load_ends, lost=LOST)
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)


def _load_module(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _loads.depth += 1
    if _loads.depth > 1 or not wrapped_models.count():
        return None
    loaded = {id(p) for p in args[0].parameters()}
    assigned = bool(args[3] if len(args) > 3 else kwargs.get("assign", False))
    return "weights", _owners(loaded), recorder.site(), assigned


def _load_optimizer(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _loads.depth += 1
    return None if _loads.depth > 1 else _for_optimizer(recorder, "optimizer", args[0])


def _load_scheduler(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _loads.depth += 1
    optimizer = getattr(args[0], "optimizer", None)
    if _loads.depth > 1 or optimizer is None:
        return None
    return _for_optimizer(recorder, "scheduler", optimizer)


def _for_optimizer(recorder: Recorder, what: str, optimizer: Any) -> Any:
    owners = _owners(_parameter_ids(optimizer)) if wrapped_models.count() else []
    if not owners and len(_loads.early) < EARLY_AT_MOST:
        _loads.early.append((what, weakref.ref(optimizer), time.monotonic(), recorder.site()))
    return what, owners, recorder.site(), False


def _load_scaler(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _loads.depth += 1
    return None if _loads.depth > 1 else ("scaler", [None], recorder.site(), False)


def _parameter_ids(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _wrapped(recorder: Recorder, model: Model) -> None:
    mine = {id(p) for ref in model.parameters if (p := ref()) is not None}
    for what, reference, at, site in list(_loads.early):
        optimizer = reference()
        if optimizer is not None and mine & _parameter_ids(optimizer):
            recorder.emit(
                Loaded(at=at, what=what, model=model.number, step=recorder.step, site=site)
            )


def _owners(parameters: set[int]) -> list[Model]:
    return [
        model
        for model in wrapped_models.live()
        if any((p := ref()) is not None and id(p) in parameters for ref in model.parameters)
    ]


def _load_ends(recorder: Recorder, token: Any, result: Any, error: BaseException | None) -> None:
    _loads.depth = max(0, _loads.depth - 1)
    if token is None or error is not None:
        return
    what, owners, site, assigned = token
    for model in owners:
        if model is not None:
            replica_digests.look_whole(model)
        _loads.emitted += 1
        if _loads.emitted <= EMITTED_AT_MOST:
            recorder.emit(
                Loaded(
                    at=time.monotonic(),
                    what=what,
                    model=-1 if model is None else model.number,
                    step=recorder.step,
                    site=site,
                    assigned=assigned,
                )
            )


def _state_dict_begins(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _loads.saving += 1  # modules ask their children
    if _loads.saving > 1 or not wrapped_models.count():
        return
    for model in wrapped_models.live():
        if args[0] is model.inner() or (model.wrapper and args[0] is model.wrapper()):
            replica_digests.look_whole(model)
            site = recorder.site()
            call, _loads.taken[site] = _loads.taken[site], _loads.taken[site] + 1
            if call < 20 or call & (call - 1) == 0:
                recorder.emit(
                    StateTaken(
                        at=time.monotonic(),
                        model=model.number,
                        step=recorder.step,
                        forwards=model.forwards,
                        site=site,
                        call=call,
                    )
                )


def _state_dict_ends(
    recorder: Recorder, token: Any, result: Any, error: BaseException | None
) -> None:
    _loads.saving = max(0, _loads.saving - 1)
