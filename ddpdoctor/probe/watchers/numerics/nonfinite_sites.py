"""At which line of the user did NaN or infinity arise?

Looks for the operation that the graph names in the source of models, of the function that calls the
backward, and of what these call.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from ...recording.recorder import Recorder
from ...training.tracked_model import Model
from . import nonfinite_origin
from .nonfinite_origin import Origin


def site_of_origin(
    recorder: Recorder,
    origin: Origin,
    live: list[Model],
    frame: Any,
    root: Any,
    forward_site: int,
    beyond: bool,
    returned: list[int],
) -> int:
    """Site of the line where the value arose, -1 if unknown.

    Args:
        frame: of the function that calls the backward of `root`.
        forward_site: line that calls the models.
        beyond: the value entered the graph as a constant after the forwards.
        returned: by model, torch's number of the first autograd node after its forward, -1 if
            unknown.
    """
    if beyond:
        return _site_after_forward(recorder, origin, forward_site, frame, root)
    if origin.entered:
        return _site_of_maker(recorder, live, origin.module, forward_site)
    outside = bool(returned) and all(0 <= number <= origin.number for number in returned)
    if outside and frame is not None and origin.derivative_site < 0:
        site = _site_outside(recorder, origin, frame, forward_site)
    else:
        site = _site_of_operation(recorder, origin, live, frame)
    if site >= 0 or frame is None or origin.derivative_site >= 0:
        return site if site >= 0 else origin.derivative_site
    within = len(returned) == 1 and 0 <= origin.number < returned[0]
    if within and forward_site >= 0:
        return forward_site
    return recorder.sites.number(frame.f_code, nonfinite_origin.line_of_loss(frame, root))


def module_at(recorder: Recorder, site: int, live: list[Model]) -> str:
    """Name of the only module whose `forward` contains the line; empty if there is none, if several
    modules share the class, or for a whole model."""
    found: dict[CodeType, list[str]] = {}
    for inner in (model.inner() for model in live):
        for name, module in inner.named_modules() if inner is not None else ():
            forward = getattr(type(module), "forward", None)
            if isinstance(forward, FunctionType):
                found.setdefault(forward.__code__, []).append(name)
    for code, names in found.items():
        lines = [line for *_, line in code.co_lines() if line]
        if min(lines) <= recorder.sites.line(site, code) <= max(lines):
            return names[0] if len(names) == 1 else ""
    return ""


def _site_of_operation(recorder: Recorder, origin: Origin, live: list[Model], frame: Any) -> int:
    operation = origin.operation
    if origin.derivative_site >= 0 and not operation:
        return -1
    for model in live:
        inner = model.inner()
        place = (
            nonfinite_origin.line_of_operation(operation, inner, frame)
            if inner is not None
            else None
        )
        if place is not None:
            return recorder.sites.place(*place)
    return -1


def _site_outside(recorder: Recorder, origin: Origin, frame: Any, forward_site: int) -> int:
    """Site of the operation on what the models returned: after their call, in the function that
    calls backward, or else in its file."""
    first = recorder.sites.line(forward_site, frame.f_code)
    found = nonfinite_origin.lines_from(origin.operation, frame, first) if first > 0 else set()
    if not found:
        place = nonfinite_origin.line_of_operation(origin.operation, None, frame)
        found = set() if place is None else {place}
    return recorder.sites.place(*found.pop()) if len(found) == 1 else -1


def _site_after_forward(
    recorder: Recorder, origin: Origin, forward_site: int, frame: Any, root: Any
) -> int:
    """Site between forward and backward, if one function calls both; else -1."""
    first = -1 if frame is None else recorder.sites.line(forward_site, frame.f_code)
    if first < 0:
        return -1
    line = nonfinite_origin.line_after(origin.entered, frame, root, first)
    return recorder.sites.number(frame.f_code, line) if line >= 0 else -1


def _site_of_maker(recorder: Recorder, live: list[Model], module: str, otherwise: int) -> int:
    inner = live[0].inner() if len(live) == 1 and module else None
    place = None if inner is None else nonfinite_origin.line_of_maker(inner, module)
    return otherwise if place is None else recorder.sites.place(*place)
