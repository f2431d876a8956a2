"""Which statement between a backward and a step clears gradients?

The source code of the function that holds both is searched, since the statement may run only once
and cannot be traced afterwards.
"""

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
"""Digests of a gradient that is None, and of one that is zero."""


def clearing_site(recorder: Recorder, frame: FrameType, backward_site: int) -> tuple[int, ...]:
    """Site of the line that clears gradients between the backward and the line that is running in
    the innermost user function; empty if unknown."""
    user, line = recorder.sites.user_frame(frame), -1
    if user is not None:
        line = clearing_line(user, recorder.sites.line(backward_site, user.f_code))
    return (recorder.sites.number(user.f_code, line),) if user and line > 0 else ()


def clearing_line(frame: FrameType, after: int) -> int:
    """The only line of a running function that clears gradients, between `after` and the current
    line; -1 if there is none or several."""
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
        return given and (_is_none_or_zero(node.value) or "zeros" in _called_name(node.value))
    name = _called_name(node)
    if name in ("zero_grad", "_foreach_zero_"):
        return True
    filled = name == "zero_" or (name == "fill_" and all(map(_is_none_or_zero, node.args)))
    return filled and any(getattr(n, "attr", "") == "grad" for n in ast.walk(node.func))


def _is_none_or_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _called_name(node: ast.expr) -> str:
    """The last name of a called function (`zeros` in `torch.zeros()`); empty if it is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
