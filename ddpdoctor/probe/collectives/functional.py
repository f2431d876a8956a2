"""Logs the collectives of DTensors (tensor parallelism, `full_tensor`).

They are those of `torch.distributed._functional_collectives`, which return their result; torch
waits for it when it is first used. torch.compile traces calls of these functions and must find
them as they are, so only the modules of DTensors are given other ones.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ...storage.call_ring import State
from ..recording.import_hooks import when_imported
from ..recording.patching import replace
from ..recording.recorder import Recorder
from ..recording.threads import Inside
from ..recording.torch_compat import named_group
from ..recording.watcher import Args, Error, Kwargs, Watcher
from . import call_hooks
from .call_log import call_log_of
from .collectives import Collectives, mark
from .process_groups import ProcessGroups

RESULTS_AWAITED = 256
"""Results that were not waited for, and that are remembered."""
MODULE, DTENSORS = "torch.distributed._functional_collectives", "torch.distributed.tensor"

OPERATIONS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
}
"""The functions that issue a collective, and the names of what they issue in records. In older
versions of torch two have another name, and so has what tells their group."""


class _StandIn(ModuleType):
    """The module of the functions, some of which are others here."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class FunctionalCollectives(Watcher):
    """
    Attributes:
        inside: threads in one of the functions; some call another one.
        awaited: by address of a result, the number of its call in the ring and when it returned.
        tracing: asks whether torch traces the program, so that nothing is communicated.
    """

    lost = "collectives of DTensors, and with them mismatches and hangs"

    def __init__(self) -> None:
        self.inside = Inside()
        self.awaited: dict[int, int] = {}
        self.tracing: Callable[[], bool] = lambda: False

    def install(self) -> None:
        # Either may come first: transformers gets the module of DTensors without the other.
        when_imported(
            MODULE,
            lambda module: when_imported(DTENSORS, lambda _: self._watch(module), lost=self.lost),
            lost=self.lost,
        )

    def _watch(self, module: Any) -> None:
        self.tracing = getattr(module, "_are_we_tracing", self.tracing)
        stand_in = _StandIn(module)
        resolve = getattr(module, "_resolve_group", None) or module._resolve_group_name
        for name, op in OPERATIONS.items():
            function = getattr(module, name, None)
            if function is None:
                continue
            setattr(stand_in, name, function)
            places = {n: i for i, n in enumerate(inspect.signature(function).parameters)}
            begins = partial(self._called, op, places, resolve)
            self.around(stand_in, name, before=begins, after=self._returned)
        for path, user in list(sys.modules.items()):
            if path.startswith(f"{DTENSORS}.") and isinstance(user, ModuleType):
                for name, value in list(vars(user).items()):
                    if value is module:
                        replace(user, name, stand_in)
        for name in ("trigger_wait", "wait"):
            self.around(module.AsyncCollectiveTensor, name, before=self._waits, after=self._waited)

    def _called(
        self,
        op: str,
        places: dict[str, int],
        resolve: Callable[..., Any],
        recorder: Recorder,
        args: Args,
        kwargs: Kwargs,
    ) -> int | None:
        if self.inside or Collectives.current.inside or self.tracing():
            return None

        def given(name: str) -> Any:
            place = places.get(name, len(args))
            return args[place] if place < len(args) else kwargs.get(name)

        group = resolve(given("group"), given("tag") or "")
        if isinstance(group, str):
            group = named_group(group)
        current = ProcessGroups.current
        number = current.number_of(group)
        log = call_log_of(recorder)
        if number < 0 or log is None or not current.exist():
            return None
        reduction = str(given("reduceOp") or "").upper()
        sized = op != "all_to_all_single"
        tensor = given("self")
        called = log.collective(number, op, log.here(), tensor, sized, reduction or None)
        self.inside.enter()
        return called

    def _returned(self, recorder: Recorder, number: Any, result: Any, error: Error) -> None:
        if number is None:
            return
        self.inside.leave()
        asynchronous = error is None and hasattr(result, "elem")
        state = State.FAILED if error is not None else State.DONE
        mark(number, State.RETURNED if asynchronous else state)
        if asynchronous:
            if len(self.awaited) >= RESULTS_AWAITED:
                self.awaited.pop(next(iter(self.awaited)))
            self.awaited[_address(result)] = number

    def _waits(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        if not self.awaited or self.tracing():
            return None
        number = self.awaited.pop(_address(args[0]), None)
        mark(number, State.WAITING)
        return number, time.monotonic()

    def _waited(self, recorder: Recorder, token: Any, result: Any, error: Error) -> None:
        number, began = token or (None, 0.0)
        if number is not None:
            mark(number, State.DONE if error is None else State.FAILED)
            call_hooks.waited.fire(recorder, time.monotonic() - began)


def _address(result: Any) -> int:
    """Where the values of a result lie that is waited for when it is used."""
    return int(result.elem.data_ptr())
