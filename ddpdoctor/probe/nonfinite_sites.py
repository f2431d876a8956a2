"""The user's line where NaN or infinity arose, as near as it is known."""

from __future__ import annotations

from typing import Any

from . import nonfinite_origin
from .models import Model
from .nonfinite_origin import Origin
from .recorder import Recorder


def of_origin(active: Recorder, origin: Origin, live: list[Model], frame: Any, root: Any) -> int:
    operation = origin.operation
    if origin.derivative_site >= 0 and not operation:
        return origin.derivative_site
    for model in live:
        inner = model.inner()
        place = (
            nonfinite_origin.line_of_operation(operation, inner, frame)
            if inner is not None
            else None
        )
        if place is not None:
            return active.sites.place(*place)
    if frame is None or origin.derivative_site >= 0:
        return origin.derivative_site
    return active.sites.number(frame.f_code, nonfinite_origin.line_of_loss(frame, root))


def after_the_forward(
    active: Recorder, origin: Origin, forward_site: int, frame: Any, root: Any
) -> int:
    """The line between the forward and the backward, where one function makes both."""
    first = -1 if frame is None else active.sites.line(forward_site, frame.f_code)
    if first < 0:
        return -1
    line = nonfinite_origin.line_after(origin.entered, frame, root, first)
    return active.sites.number(frame.f_code, line) if line >= 0 else -1


def of_maker(active: Recorder, live: list[Model], module: str, otherwise: int) -> int:
    inner = live[0].inner() if len(live) == 1 and module else None
    place = None if inner is None else nonfinite_origin.line_of_maker(inner, module)
    return otherwise if place is None else active.sites.place(*place)
