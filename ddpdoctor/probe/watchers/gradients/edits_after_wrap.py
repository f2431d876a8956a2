"""Parameters that this rank edits between the wrap, which makes them equal, and the first step.

It happens once, so no line can be followed when it is known: the source is asked which statement
between the wrap and the first forward changes tensors in place.
"""

from __future__ import annotations

import sys
import time
from types import CodeType

from msgspec.structs import replace

from ....events import Edited
from ...recording.hooks import Subscriptions
from ...recording.recorder import Recorder
from ...source.inplace_writes import editing
from ...tensors.digests import digests
from ...training import lifecycle, wrapped_models
from ...training.records import Forward, Step
from ...training.tracked_model import Model

LOST = "edits of parameters between the wrap and the first step"

LOOKED_AT = 6
FORWARDS = 4
"""Forwards before the first step at which they are looked at."""

FRAMES_AT_MOST = 50

Place = tuple[CodeType, int]


class Fresh:
    """A model that has not stepped yet: digests of some parameters as the wrap left them, the
    lines of the user's that were running, and what edited them before the first forward.

    Attributes:
        forwards: so far; moved: at one after the first, they were not what the wrap left.
    """

    def __init__(self, positions: list[int], numbers: list[int], places: list[Place]) -> None:
        self.positions = positions
        self.numbers = numbers
        self.places = places
        self.forwards = 0
        self.moved = False
        self.edited_at: list[Place] = []


_fresh: dict[Model, Fresh] = {}
_waiting = Subscriptions()


def install() -> None:
    _fresh.clear()
    lifecycle.wrapped.subscribe(_wrapped, lost=LOST)
    _waiting[:] = (
        lifecycle.forward_begins.subscribe(_forward_begins, lost=LOST, awake=False),
        lifecycle.step_begins.subscribe(_step_begins, lost=LOST, awake=False),
    )


def _wrapped(recorder: Recorder, model: Model) -> None:
    count = len(model.parameters)
    replicated = [p for p in range(count) if p not in model.ignored]
    step = max(1, len(replicated) // (LOOKED_AT - 1))
    positions = sorted({*replicated[::step][: LOOKED_AT - 1], *replicated[-1:]})
    _fresh[model] = Fresh(positions, _numbers(model, positions), _places(recorder))
    _waiting.enable()


def _numbers(model: Model, positions: list[int]) -> list[int]:
    return digests([model.parameters[p]() for p in positions])


def _places(recorder: Recorder) -> list[Place]:
    """Where the user's code is, outermost first."""
    found: list[Place] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < FRAMES_AT_MOST:
        if recorder.sites.kind(frame.f_code) == "user":
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def _forward_begins(recorder: Recorder, forward: Forward) -> None:
    fresh = _fresh.get(forward.model)
    if fresh is None or fresh.forwards == FORWARDS:
        return
    fresh.forwards += 1
    if _numbers(forward.model, fresh.positions) == fresh.numbers:
        return
    if fresh.forwards == 1:
        fresh.edited_at = editing(fresh.places, _places(recorder))
    fresh.moved = fresh.forwards > 1


def _step_begins(recorder: Recorder, step: Step) -> None:
    for holding in step.holdings:
        fresh = _fresh.pop(holding.model, None)
        if fresh is None:
            continue
        changed = _numbers(holding.model, fresh.positions) != fresh.numbers
        if not changed and not fresh.moved:
            continue
        sites = [recorder.sites.number(*place) for place in fresh.edited_at]
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
    for model in [m for m in _fresh if m not in wrapped_models.live()]:
        del _fresh[model]
    if not _fresh:
        _waiting.disable()
