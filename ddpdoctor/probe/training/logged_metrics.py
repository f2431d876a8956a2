"""Which line of the program handed a number to a framework, by the name under which the framework
uses it?

A framework that averages what is logged, and later steps a scheduler by it, has only its name left.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import isfinite
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ...events import Logged, MetricUsed, ReducedMetric
from ..collectives import call_sites
from ..recording.code_locations import LIBRARY, USER
from ..recording.frames import variables
from ..recording.import_hooks import when_imported
from ..recording.recorder import Recorder
from ..recording.watcher import Args, Kwargs, Watcher

LOGGERS = {
    "lightning.pytorch.core.module": ("LightningModule", "log", "sync_dist"),
    "pytorch_lightning.core.module": ("LightningModule", "log", "sync_dist"),
}
"""By module: the class and its method that is given a name and a number, and the option by which it
reduces that number over the ranks."""

REDUCERS = {
    "lightning.pytorch.trainer.connectors.logger_connector.result": "_ResultMetric",
    "pytorch_lightning.trainer.connectors.logger_connector.result": "_ResultMetric",
}
"""By module: the class whose `compute` and `update` reduce the number that `meta.name` names."""


class Decider(NamedTuple):
    """A class of a framework that decides by a number.

    Attributes:
        method: of the class, which is given the number as the argument at `position`, or by
            `given`.
        name: the name of the number, from the arguments.
        by_name: the number is logged by that name (see `LOGGERS`); else the program hands it over
            where it calls the framework.
    """

    kind: str
    method: str
    position: int
    given: str
    name: Callable[[Args], Any]
    by_name: bool


_CHECKPOINT = Decider(
    "ModelCheckpoint", "check_monitor_top_k", 2, "current", lambda args: args[0].monitor, True
)
_STOPPING = Decider(
    "EarlyStopping", "_evaluate_stopping_criteria", 1, "current", lambda args: args[0].monitor, True
)
DECIDERS = {
    "lightning.pytorch.callbacks.model_checkpoint": _CHECKPOINT,
    "pytorch_lightning.callbacks.model_checkpoint": _CHECKPOINT,
    "lightning.pytorch.callbacks.early_stopping": _STOPPING,
    "pytorch_lightning.callbacks.early_stopping": _STOPPING,
    "transformers.trainer_callback": Decider(
        "EarlyStoppingCallback",
        "check_metric_value",
        4,
        "metric_value",
        lambda args: args[1].metric_for_best_model,
        False,
    ),
}
"""By module."""

CALLS_IN_FULL = 20
"""Decisions of one kind that are all recorded; later ones at powers of two."""

NAMES_AT_MOST = 200
"""Names whose lines are kept."""


class LoggedMetrics(Watcher):
    """
    Attributes:
        lines: by name, where the number was logged first.
        reduced: names of numbers that the framework was asked to reduce.
        reducing: the functions of frameworks that do so.
        decisions: by class and name, how often it decided.
    """

    lost = "which lines log the metrics of a framework"

    def __init__(self) -> None:
        self.lines: dict[str, Logged] = {}
        self.reduced: set[str] = set()
        self.reducing: set[CodeType] = set()
        self.decisions: Counter[tuple[str, str]] = Counter()

    def install(self) -> None:
        call_sites.names.reduced = self._reduced_now
        for name in LOGGERS:
            when_imported(name, partial(self._watch, name), lost=self.lost)
        for name, owner in REDUCERS.items():
            when_imported(name, partial(self._find_reducers, owner), lost=self.lost)
        for name in DECIDERS:
            when_imported(name, partial(self._watch_decider, name), lost=self.lost)

    def _find_reducers(self, owner: str, module: Any) -> None:
        kind = getattr(module, owner)
        self.reducing |= {kind.compute.__code__, kind.update.__code__}

    def _reduced_now(self, recorder: Recorder) -> Logged | None:
        """The number that a framework is reducing, between the current call and the user's code;
        None if it is doing something else."""
        frame: FrameType | None = sys._getframe(1) if self.reduced else None
        while frame is not None and recorder.sites.kind(frame.f_code) is not USER:
            if frame.f_code in self.reducing:
                meta = getattr(variables(frame).get("self"), "meta", None)
                return self.lines.get(getattr(meta, "name", ""))
            frame = frame.f_back
        return None

    def _watch_decider(self, by: str, module: Any) -> None:
        decider = DECIDERS[by]
        owner = getattr(module, decider.kind)
        self.around(owner, decider.method, before=partial(self._deciding, by, decider))

    def _deciding(
        self, by: str, decider: Decider, recorder: Recorder, args: Args, kwargs: Kwargs
    ) -> None:
        name = decider.name(args)
        at = decider.position
        given = args[at] if len(args) > at else kwargs.get(decider.given)
        if type(name) is not str or name in self.reduced or (metric := _number(given)) is None:
            return
        logged = self.lines.get(name)
        if logged is None and not decider.by_name:
            logged = Logged(name=name, site=recorder.site(), by=by)
        if logged is None:
            return
        kind = type(args[0]).__name__
        call = self.decisions[kind, name]
        self.decisions[kind, name] += 1
        if call < CALLS_IN_FULL or call & (call - 1) == 0:
            recorder.emit(
                MetricUsed(
                    at=time.monotonic(),
                    kind=kind,
                    step=recorder.step,
                    call=call,
                    site=recorder.site(),
                    metric=metric,
                    logged=logged,
                )
            )

    def _watch(self, by: str, module: Any) -> None:
        owner, method, option = LOGGERS[by]
        kind = getattr(module, owner)
        self.around(kind, method, before=partial(self._logging, by, option))

    def _logging(
        self, by: str, option: str, recorder: Recorder, args: Args, kwargs: Kwargs
    ) -> None:
        name = args[1] if len(args) > 1 else kwargs.get("name")
        if type(name) is not str or name in self.lines or len(self.lines) >= NAMES_AT_MOST:
            return
        self.lines[name] = Logged(name=name, site=recorder.site(), by=by)
        if kwargs.get(option):
            self.reduced.add(name)
            if not kwargs.get("rank_zero_only"):
                site = self.lines[name].site
                recorder.emit(ReducedMetric(at=time.monotonic(), name=name, site=site))
        if len(self.lines) == NAMES_AT_MOST:
            recorder.emit(ReducedMetric(at=time.monotonic(), name="", site=-1))

    def used_by_framework(self, recorder: Recorder) -> Logged | None:
        """The number, not reduced, whose name a running function of a framework holds, between the
        current call and the user's code; None if there is none."""
        frame: FrameType | None = sys._getframe(1) if self.lines else None
        while frame is not None and (kind := recorder.sites.kind(frame.f_code)) is not USER:
            if kind is LIBRARY:
                for value in variables(frame).values():
                    if type(value) is str and value in self.lines:
                        return None if value in self.reduced else self.lines[value]
            frame = frame.f_back
        return None


def _number(value: Any) -> float | None:
    """A finite number, or one in a tensor on the CPU; reading it from a device would wait."""
    if type(value) is sys.modules["torch"].Tensor:
        if value.numel() != 1 or not value.is_cpu:
            return None
        value = value.item()
    return float(value) if type(value) in (int, float) and isfinite(value) else None
