"""Does this rank change parameters between the wrap, which makes them equal, and the first step?

Digests from the wrap are compared with those at the first forwards. It happens once, so its line
cannot be traced when it is noticed: the source code between the wrap and the first forward is
searched for statements that change tensors in place.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from types import CodeType

from msgspec.structs import replace

from ....events import Edited
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...recording.watcher import Watcher, on
from ...source.inplace_writes import inplace_statements
from ...tensors.tensor_watch import TensorWatch
from ...training import lifecycle
from ...training.records import Forward, Step
from ...training.tracked_model import Model, parameters
from ...training.wrapped_models import WrappedModels
from .gradient_sync import GradientSync
from .limits import FORWARDS_AFTER_WRAP, FRAMES_AT_MOST
from .watched_parameters import named_where_written, to_watch

Line = tuple[CodeType, int]


def running(recorder: Recorder) -> list[Line]:
    """The user's lines that are running, outermost first."""
    return recorder.sites.user_lines(sys._getframe(1), FRAMES_AT_MOST)[::-1]


class UnsteppedModel:
    """A wrapped model before its first optimizer step.

    Attributes:
        sampled: some of its parameters, by position in `Wrapped.parameters`, since the wrap.
        lines: the user's lines that were running at the wrap, outermost first.
        forwards: forwards so far.
        moved: at a forward after the first, the digests were no longer those of the wrap.
        edited_at: lines before the first forward that change tensors in place.
    """

    def __init__(self, sampled: TensorWatch, lines: list[Line]) -> None:
        self.sampled = sampled
        self.lines = lines
        self.forwards = 0
        self.moved = False
        self.edited_at: list[Line] = []


class EditsAfterWrap(Watcher):
    lost = "edits of parameters between the wrap and the first step"
    after = (GradientSync,)  # decides whether gradients were synchronised

    def __init__(self) -> None:
        self._unstepped: dict[Model, UnsteppedModel] = {}
        self._waiting = Subscriptions()

    @on(lifecycle.wrapped)
    def _wrapped(self, recorder: Recorder, model: Model) -> None:
        count = len(model.parameters)
        replicated = [p for p in range(count) if p not in model.ignored]
        lines = running(recorder)
        watched = to_watch(replicated, named_where_written(model, lines))
        sampled = TensorWatch(watched, partial(parameters, model))
        sampled.keep("wrap")
        self._unstepped[model] = UnsteppedModel(sampled, lines)
        self._waiting.enable()

    @on(lifecycle.forward_begins, during="_waiting")
    def _forward_begins(self, recorder: Recorder, forward: Forward) -> None:
        unstepped = self._unstepped.get(forward.model)
        if unstepped is None or unstepped.forwards == FORWARDS_AFTER_WRAP:
            return
        unstepped.forwards += 1
        if not unstepped.sampled.changed("wrap"):
            return
        if unstepped.forwards == 1:
            unstepped.edited_at = inplace_statements(unstepped.lines, running(recorder))
        unstepped.moved = unstepped.forwards > 1

    @on(lifecycle.step_begins, during="_waiting")
    def _step_begins(self, recorder: Recorder, step: Step) -> None:
        for holding in step.holdings:
            unstepped = self._unstepped.pop(holding.model, None)
            if unstepped is None:
                continue
            changed = bool(unstepped.sampled.changed("wrap"))
            if not changed and not unstepped.moved:
                continue
            sites = [recorder.sites.number(*line) for line in unstepped.edited_at]
            mine = Edited(
                at=time.monotonic(),
                model=holding.model.number,
                optimizer=holding.optimizer,
                kind="parameters",
                step=step.number,
                changed=changed,
                undone=not changed,
                site=sites[0] if sites else -1,
                more=tuple(sites[1:]),
            )
            recorder.emit(mine)
            recorder.emit(
                replace(mine, step=step.number + 1, changed=False, undone=False, site=-1, more=())
            )
        for model in [m for m in self._unstepped if m not in WrappedModels.current.live()]:
            del self._unstepped[model]
        if not self._unstepped:
            self._waiting.disable()
