"""Which statement between a backward and a step clears gradients?

The source code of the function that holds both is searched, since the statement may run only once
and cannot be traced afterwards.
"""

from __future__ import annotations

import ast
from types import FrameType

from ...recording.frames import variables
from ...recording.recorder import Recorder
from ...source.ast_cache import called_name, parts_of
from ...source.call_resolver import Scope
from ...source.dead_branches import never_runs
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
        zeros = isinstance(node.value, ast.Call) and "zeros" in called_name(node.value)
        return given and (zeros or _is_none_or_zero(node.value))
    name = called_name(node)
    if name in ("zero_grad", "_foreach_zero_"):
        return True
    filled = name == "zero_" or (name == "fill_" and all(map(_is_none_or_zero, node.args)))
    return filled and any(getattr(n, "attr", "") == "grad" for n in ast.walk(node.func))


def _is_none_or_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
