"""The statement between a backward and a step that clears gradients, read off the source of the
function that both stand in: it may be reached once only."""

from __future__ import annotations

import ast
from types import FrameType

from ...recording.frames import variables
from ...recording.recorder import Recorder
from ...source.call_resolver import Scope
from ...source.dead_branches import never_runs
from ...source.source_text import parts_of
from ...tensors.digests import ABSENT, ZERO

CLEARED = {ABSENT, ZERO}
"""Digests of no gradient, and of one of zeros."""


def clearing_site(recorder: Recorder, frame: FrameType, backward_site: int) -> tuple[int, ...]:
    """The site of that line of the user's function that runs, after a backward; none if unknown."""
    user, line = recorder.sites.user_frame(frame), -1
    if user is not None:
        line = clearing_line(user, recorder.sites.line(backward_site, user.f_code))
    return (recorder.sites.number(user.f_code, line),) if user and line > 0 else ()


def clearing_line(frame: FrameType, after: int) -> int:
    """The only line of a running function, after that one and before the line that is running, that
    clears gradients; -1 where there is none, or there are several."""
    if after < 0:
        return -1
    names = Scope(variables(frame), frame.f_globals)
    lines = {
        node.lineno
        for node in parts_of(frame.f_code)
        if isinstance(node, (ast.Assign, ast.Call))
        and after < node.lineno < frame.f_lineno
        and _clears(node)
    }
    lines = {n for n in lines if not never_runs(frame.f_code, n, names.get)}
    return lines.pop() if len(lines) == 1 else -1


def _clears(node: ast.Assign | ast.Call) -> bool:
    """Whether it is `p.grad.zero_()`, `p.grad = None`, `optimizer.zero_grad()` or the like."""
    if isinstance(node, ast.Assign):
        given = any(isinstance(t, ast.Attribute) and t.attr == "grad" for t in node.targets)
        return given and (_is_nothing(node.value) or "zeros" in _called(node.value))
    name = _called(node)
    if name in ("zero_grad", "_foreach_zero_"):
        return True
    filled = name == "zero_" or (name == "fill_" and all(map(_is_nothing, node.args)))
    return filled and any(getattr(n, "attr", "") == "grad" for n in ast.walk(node.func))


def _is_nothing(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _called(node: ast.expr) -> str:
    """The last name of what is called, empty where nothing is."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
