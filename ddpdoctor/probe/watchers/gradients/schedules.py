"""How many steps was a learning-rate schedule planned for, and how many did it take?

Only schedules that end, or turn around, after a number of steps that they are given.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType, MethodType
from typing import Any

from ....events import ScheduleEnded
from ...recording import hooks, torch_compat
from ...recording.code_locations import OWN, USER
from ...recording.recorder import Recorder
from ...recording.watcher import Args, Error, Kwargs, Watcher, on
from ...recording.weak_references import WeakIdentityMap
from ...source import statements
from ...training.optimizers import Optimizers
from .hyperparameters import HyperparameterWatch
from .limits import LENGTHS_AT_MOST, LOOPS_SEARCHED, SCHEDULES_AT_MOST


def _falling(scheduler: Any) -> int:
    """A rate that rises (`LinearLR` by default) is a warm-up, which may be of any length."""
    return int(scheduler.total_iters) if scheduler.end_factor < scheduler.start_factor else 0


_TOTAL = re.compile(
    r"(?:.*_)?(?:total|train\w*|max|num|n|all)_\w*(?:steps?|iters?|iterations|updates)"
    r"|total|t_total|T_max|(?:total|max|num)(?:steps|iters|updates)",
    re.IGNORECASE,
)
_OTHER = re.compile(r"warm|per|epoch|cycle|hold|start|min", re.IGNORECASE)


def _by_function(scheduler: Any) -> int:
    """The number of steps that the function of a `LambdaLR` is given under a name for it: by
    `functools.partial`, in its closure, as an attribute, or as a global variable."""
    functions = getattr(scheduler, "lr_lambdas", None) or [None]
    found: dict[str, Any] = {}
    function = functions[0]
    while isinstance(function, functools.partial):
        names = getattr(getattr(function.func, "__code__", None), "co_varnames", ())
        names = names[1:] if isinstance(function.func, MethodType) else names
        found |= dict(zip(names, function.args, strict=False)) | function.keywords
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        found |= getattr(function, "__dict__", {})
    else:
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # it is empty
                found[name] = cell.cell_contents
        found |= {n: function.__globals__.get(n) for n in code.co_names}
    totals = {
        value
        for name, value in found.items()
        if type(value) is int and value > 1 and _TOTAL.fullmatch(name) and not _OTHER.search(name)
    }
    return totals.pop() if len(totals) == 1 else 0


def _sequence(scheduler: Any) -> int:
    last, begins = torch_compat.last_in_sequence(scheduler)
    plan = PLANS.get(type(last).__name__)
    end = plan(last) if plan is not None else 0
    return begins + end if end else 0


PLANS: Mapping[str, Callable[[Any], int]] = {
    "OneCycleLR": lambda scheduler: int(scheduler.total_steps),
    "CosineAnnealingLR": lambda scheduler: int(scheduler.T_max),
    "LambdaLR": _by_function,
    "LinearLR": _falling,
    "PolynomialLR": lambda scheduler: int(scheduler.total_iters),
    "SequentialLR": _sequence,
    **dict.fromkeys(
        ("StepLR", "MultiStepLR", "ExponentialLR", "CyclicLR", "CosineAnnealingWarmRestarts"),
        lambda scheduler: 0,
    ),
}
"""The number of steps that a scheduler was planned for, by its class; 0 if it has no such number.
"""


class Schedule:
    """One scheduler that the program steps.

    Attributes:
        made: the line that made it; `lengths` as in `ScheduleEnded`.
        calls: of `step` by the program; `counted` the scheduler's own count; `by` as in
            `ScheduleEnded`.
    """

    def __init__(self, kind: str, made: int, lengths: tuple[int, ...]) -> None:
        self.kind, self.made, self.lengths = kind, made, lengths
        self.calls = self.counted = self.planned = 0
        self.step_site = self.optimizer = -1
        self.by = ""
        self.steps = 0
        self.rate = -1.0
        self.may_stop = False


class ScheduleLengths(Watcher):
    """
    Attributes:
        known: by scheduler.
        lengths: what `len(loader)` returned to the program so far.
    """

    lost = "the lengths of learning-rate schedules"
    after = (HyperparameterWatch,)

    def __init__(self) -> None:
        self.known: WeakIdentityMap[Schedule] = WeakIdentityMap()
        self.schedules: list[Schedule] = []
        self.lengths: dict[int, None] = {}

    def install(self) -> None:
        from torch.optim import lr_scheduler
        from torch.utils.data import DataLoader

        for name in PLANS:
            kind = getattr(lr_scheduler, name)
            self.around(kind, "__init__", before=self._making, after=self._made)
        self.around(DataLoader, "__len__", before=self._asked, after=self._answered)

    def _asked(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> bool:
        if len(self.lengths) >= LENGTHS_AT_MOST:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and recorder.sites.kind(frame.f_code) is OWN:
            if frame.f_code.co_name in ("__iter__", "__next__"):  # the loop over the loader
                return False
            frame = frame.f_back
        return frame is not None and recorder.sites.kind(frame.f_code) is USER

    def _answered(self, recorder: Recorder, token: bool, result: Any, error: Error) -> None:
        if token and error is None:
            self.lengths[int(result)] = None

    def _making(self, recorder: Recorder, args: Args, kwargs: Kwargs) -> Any:
        return args[0]

    def _made(self, recorder: Recorder, scheduler: Any, result: Any, error: Error) -> None:
        if scheduler is None or error is not None or len(self.schedules) >= SCHEDULES_AT_MOST:
            return
        kind = type(scheduler).__name__
        self.known[scheduler] = Schedule(kind, recorder.site(), tuple(self.lengths))

    @on(HyperparameterWatch.scheduled)
    def _stepped(self, recorder: Recorder, scheduler: Any) -> None:
        schedule = self.known.get(scheduler)
        if schedule is None:
            return
        schedule.calls += 1
        schedule.counted = scheduler.last_epoch
        if schedule.calls == 1:
            self._first(recorder, schedule, scheduler)
        known = Optimizers.current.known_optimizer(scheduler.optimizer)
        if known is not None:
            schedule.optimizer, schedule.steps = known.number, known.steps
        group = scheduler.optimizer.param_groups[0]
        schedule.rate = group["lr"] if type(group["lr"]) is float else -1.0

    def _first(self, recorder: Recorder, schedule: Schedule, scheduler: Any) -> None:
        plan = next(
            (PLANS[k.__name__] for k in type(scheduler).__mro__ if k.__name__ in PLANS), None
        )
        schedule.planned = plan(scheduler) if plan is not None else 0
        schedule.step_site, schedule.by = recorder.site(), recorder.sites.library_called()
        if schedule.planned > 0 or schedule.by.startswith("accelerate"):
            schedule.may_stop = _may_stop(recorder)
            self.schedules.append(schedule)

    @on(hooks.leaving)
    def _leaving(self, recorder: Recorder, _: None) -> None:
        for schedule in self.schedules:
            recorder.emit(
                ScheduleEnded(
                    at=time.monotonic(),
                    kind=schedule.kind,
                    planned=schedule.planned,
                    calls=schedule.calls,
                    counted=schedule.counted,
                    optimizer=schedule.optimizer,
                    steps=schedule.steps,
                    rate=schedule.rate,
                    may_stop=schedule.may_stop,
                    lengths=schedule.lengths,
                    site=schedule.made,
                    step_site=schedule.step_site,
                    by=schedule.by,
                )
            )
        self.schedules.clear()


def _may_stop(recorder: Recorder) -> bool:
    """Whether a loop around the current line can end before its last round."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(LOOPS_SEARCHED):
        if frame is None:
            break
        if recorder.sites.kind(frame.f_code) is USER:
            around = statements.enclosing(frame.f_code.co_filename, frame.f_lineno)
            if any(s.broken or (s.kind == "while" and "<" not in s.test) for s in around):
                return True
        frame = frame.f_back
    return False
