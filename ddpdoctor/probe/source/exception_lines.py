"""The line that an exception is about, if that is not the line that raised it: a syntax error, a
`breakpoint()` left in the code, or the assignment that a missing name lacks."""

from __future__ import annotations

import ast
import bdb
import os
import re
import sys
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

from ...events import Statement
from ..recording.code_locations import USER, Sites, classify
from .ast_cache import Source, called_name, covers_line, own_nodes, parts_of, source_of
from .statements import enclosing

STOPPERS = ("breakpoint", "set_trace")
_QUOTED = re.compile(r"'([A-Za-z_]\w*)'")
_OF_NONE = re.compile(r"'NoneType' object has no attribute '(\w+)'")


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


class Setting(NamedTuple):
    """An assignment under a condition, and there is none elsewhere.

    Attributes:
        name: as the program writes it.
        under: the innermost condition around it.
    """

    name: str
    file: str
    line: int
    under: Statement


def never_set(error: BaseException) -> Setting | None:
    """Where the name that is missing would be set, if only under a condition; None where it is set
    elsewhere, too, or nowhere."""
    frame, line = _innermost(error.__traceback__)
    if frame is None:
        return None
    if isinstance(error, NameError):
        found = _QUOTED.search(str(error))
        name = getattr(error, "name", None) or (found[1] if found else "")
        return _variable(frame.f_code, name)
    if not isinstance(error, AttributeError):
        return None
    name, told = error.name or "", error.args[0] if error.args else ""
    if not name and isinstance(told, str) and (found := _OF_NONE.search(told)):
        name = found[1]  # Python tells it by itself only where it is read
    if not name:
        return None
    if error.obj is not None:
        return _attribute(type(error.obj), name)
    return _none(frame, line, name)


def _innermost(trace: TracebackType | None) -> tuple[FrameType | None, int]:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (trace.tb_frame, trace.tb_lineno) if trace is not None else (None, 0)


def _none(frame: FrameType, line: int, name: str) -> Setting | None:
    """Of the variable or attribute of `self` that is None where a line asks for its attribute."""
    source = source_of(frame.f_code.co_filename)
    function = source.function(frame.f_code) if source is not None else None
    asked = {
        ast.unparse(node.value): node.value
        for node in (own_nodes(function) if function is not None else ())
        if isinstance(node, ast.Attribute) and node.attr == name and covers_line(node, line)
    }
    if len(asked) != 1:
        return None
    (of,) = asked.values()
    if isinstance(of, ast.Name):
        return _variable(frame.f_code, of.id)
    if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
        owner = frame.f_locals.get(of.value.id)
        found = _attribute(type(owner), of.attr) if owner is not None else None
        return found._replace(name=ast.unparse(of)) if found is not None else None
    return None


def _variable(code: CodeType, name: str) -> Setting | None:
    """Of a local variable of a function, or of a variable of its file."""
    source = _users_source(code.co_filename)
    if source is None or not name:
        return None
    local = name in code.co_varnames or name in code.co_cellvars
    if not local and any(isinstance(n, ast.Global) and name in n.names for n in source.nodes):
        return None  # some function may set it
    function = source.function(code) if local else source.tree
    nodes = own_nodes(function) if function is not None else []
    lines = [n.lineno for n in nodes if isinstance(n, ast.Name) and _sets(n, n.id, name)]
    lines += [
        n.lineno
        for n in nodes
        if isinstance(n, ast.alias) and (n.asname or n.name.partition(".")[0]) == name
    ]
    return _setting(source, code.co_filename, name, lines)


def _attribute(kind: type, name: str) -> Setting | None:
    """Of an attribute that a class sets on its objects."""
    for each in kind.__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None) or ""
        source = _users_source(file)
        lines = [
            node.lineno
            for made in (source.nodes if source is not None else ())
            if isinstance(made, ast.ClassDef) and made.name == each.__name__
            for node in ast.walk(made)
            if isinstance(node, ast.Attribute) and _sets(node, node.attr, name)
        ]
        if source is not None and (found := _setting(source, file, name, lines)) is not None:
            return found
    return None


def _users_source(file: str) -> Source | None:
    """Of a file of the program; libraries are large, and set what they set."""
    return source_of(file) if file and classify(file) == USER else None


def _sets(node: ast.Name | ast.Attribute, of: str, name: str) -> bool:
    return of == name and isinstance(node.ctx, ast.Store)


def _conditional(source: Source, line: int) -> list[Statement]:
    """The condition of `x = f() if condition else None` on a line."""
    for node in source.nodes:
        value = node.value if isinstance(node, ast.Assign) and node.lineno == line else None
        if isinstance(value, ast.IfExp):
            arms = value.body, value.orelse
            none = [isinstance(arm, ast.Constant) and arm.value is None for arm in arms]
            if any(none):
                test = (
                    f"not ({source.written(value.test)})" if none[0] else source.written(value.test)
                )
                return [Statement(line=line, text=f"if {test}", kind="if", test=test)]
    return []


def _setting(source: Source, file: str, name: str, lines: Iterable[int]) -> Setting | None:
    to_none = {
        n.lineno
        for n in source.nodes
        if isinstance(n, (ast.Assign, ast.AnnAssign))
        and isinstance(n.value, ast.Constant)
        and n.value.value is None
    }
    real = [line for line in lines if line not in to_none]
    under = [
        [e for e in enclosing(file, line) if e.kind in ("if", "elif", "else")]
        or _conditional(source, line)
        for line in real
    ]
    if not real or not all(under) or len({around[0].line for around in under}) > 1:
        return None
    return Setting(name, file, real[0], under[0][0])
