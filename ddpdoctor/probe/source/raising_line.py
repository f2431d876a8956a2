"""The line that an exception is about, if that is not the line that raised it: a syntax error, or a
`breakpoint()` left in the code."""

from __future__ import annotations

import ast
import bdb
import os
import traceback

from ..recording.code_locations import USER, Sites
from .ast_cache import called_name, parts_of

STOPPERS = ("breakpoint", "set_trace")


def pointed_at(sites: Sites, error: BaseException) -> tuple[str, int, str] | None:
    """(file, line, function) of the code that does not parse, or of the `breakpoint()` whose
    debugger quit, as it does without a terminal; None for any other exception."""
    if isinstance(error, SyntaxError):
        file, line = error.filename or "", error.lineno or 0
        return (file, line, "") if sites.kind_of(file) == USER and os.path.isfile(file) else None
    if isinstance(error, bdb.BdbQuit):
        stops = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
        for code, line in reversed(stops):
            if sites.kind(code) == USER:
                return code.co_filename, _stopper(parts_of(code), line), code.co_name
    return None


def _stopper(parts: list[ast.AST], line: int) -> int:
    """The line of the call of the debugger, which stops one line later: the last call up to `line`,
    else the last in the function, else `line`."""
    calls = [
        node.lineno
        for node in parts
        if isinstance(node, ast.Call) and called_name(node) in STOPPERS
    ]
    return max((n for n in calls if n <= line), default=max(calls, default=line))
